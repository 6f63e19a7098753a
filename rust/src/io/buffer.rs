//! Page-aligned memory for reads that bypass the page cache.
//!
//! Direct reads need aligned destinations, and streaming through gigabytes of
//! weights is limited by address translation unless the pages are huge, so
//! buffers come straight from the system, aligned to a huge page where they
//! are large enough to hold one.
#![allow(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::error::{Error, Result};

/// Page size that alignment is counted in.
pub const PAGE: usize = 4096;

/// Size of a huge page on the platforms that have them.
const HUGE_PAGE: usize = 2 << 20;

/// A zeroed, page-aligned byte buffer with a fixed length. Pages cost memory
/// only once they have been written to.
#[derive(Debug)]
pub struct AlignedBuffer {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the buffer owns its mapping and hands out slices by the borrow rules.
unsafe impl Send for AlignedBuffer {}
// SAFETY: as above; shared access is read-only.
unsafe impl Sync for AlignedBuffer {}

impl AlignedBuffer {
    /// A zeroed buffer of `length` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// When the system has no such range of addresses left.
    pub fn new(length: usize) -> std::io::Result<Self> {
        let length = length.max(1).next_multiple_of(PAGE);
        if length < HUGE_PAGE {
            let start = map(length)?;
            return Ok(AlignedBuffer { start, length });
        }
        let mapped = length + HUGE_PAGE;
        let first = map(mapped)?;
        let before = first.as_ptr().align_offset(HUGE_PAGE);
        // SAFETY: `before < HUGE_PAGE`, so the result is inside the mapping.
        let start = unsafe { first.add(before) };
        // SAFETY: both ranges are page-aligned parts of the fresh mapping
        // outside the buffer, and nothing refers to them.
        unsafe {
            unmap(first, before);
            unmap(start.add(length), mapped - before - length);
        }
        // A kernel without huge pages refuses the advice, which changes nothing.
        // SAFETY: the range is the buffer's own mapping.
        let _ = unsafe { madvise(start.as_ptr().cast(), length, Advice::LinuxHugepage) };
        Ok(AlignedBuffer { start, length })
    }

    /// [`AlignedBuffer::new`] for weights, of which a smaller budget needs fewer.
    ///
    /// # Errors
    /// [`Error::System`] when the system has no such range of addresses left.
    pub fn for_weights(length: usize) -> Result<Self> {
        AlignedBuffer::new(length).map_err(|error| Error::System {
            problem: format!("the system has no {length} bytes of memory for a buffer: {error}"),
            hint: "choose a smaller --memory, or end what else uses memory".into(),
        })
    }
}

fn map(length: usize) -> std::io::Result<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE)? };
    NonNull::new(start.cast()).ok_or_else(|| std::io::ErrorKind::OutOfMemory.into())
}

/// # Safety
/// The range must be whole pages of a mapping that nothing refers to.
unsafe fn unmap(start: NonNull<u8>, length: usize) {
    if length > 0 {
        // SAFETY: vouched for by the caller. Failure would only keep the pages.
        let _ = unsafe { munmap(start.as_ptr().cast(), length) };
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `length` bytes, mapped and zeroed by the system.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.length) }
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.length) }
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is this buffer's own and no slice outlives it.
        unsafe { unmap(self.start, self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_whole_pages_and_zeroed() {
        for (asked, got) in [(0, PAGE), (1, PAGE), (PAGE + 1, 2 * PAGE), (5 << 20, 5 << 20)] {
            let mut buffer = AlignedBuffer::new(asked).expect("memory");
            assert_eq!(buffer.len(), got);
            assert_eq!(buffer.as_ptr().align_offset(PAGE), 0);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer[got - 1] = 1;
        }
    }

    #[test]
    fn large_buffers_start_at_a_huge_page() {
        let buffer = AlignedBuffer::new(HUGE_PAGE).expect("memory");
        assert_eq!(buffer.as_ptr().align_offset(HUGE_PAGE), 0);
    }
}
