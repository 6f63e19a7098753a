//! A run of bytes in one of a checkpoint's files.

/// Index of a file in the list of files that a catalog opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u16);

/// `length` bytes from `offset` in a file. Offsets are absolute and need not
/// be aligned to anything: the data start of a safetensors file is odd-sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// Which file.
    pub file: FileId,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Number of bytes; zero is allowed.
    pub length: u64,
}

impl Extent {
    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.length
    }

    /// `length` bytes that start `start` bytes into this extent.
    ///
    /// # Panics
    /// If they do not lie inside it: callers compute them from checked shapes.
    pub fn slice(&self, start: u64, length: u64) -> Extent {
        assert!(start + length <= self.length, "slice {start}+{length} of {} bytes", self.length);
        Extent { file: self.file, offset: self.offset + start, length }
    }
}
