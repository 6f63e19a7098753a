//! Element types that occur in a checkpoint.

/// Element type of a tensor of the text model, spelled as in a safetensors header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    /// Brain float: the upper half of a float32.
    Bf16,
    /// IEEE float32.
    F32,
    /// A byte: two 4-bit values, or one 8-bit exponent.
    U8,
}

impl Dtype {
    /// All of them.
    pub const ALL: [Dtype; 3] = [Dtype::Bf16, Dtype::F32, Dtype::U8];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::Bf16 => 2,
            Dtype::F32 => 4,
            Dtype::U8 => 1,
        }
    }

    /// Spelling in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "BF16",
            Dtype::F32 => "F32",
            Dtype::U8 => "U8",
        }
    }

    /// The inverse of [`Dtype::name`]; `None` for types the text model never uses.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

/// Any element type of the safetensors format. Tensors that the text model
/// ignores may have any of them, and their spans are checked all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredDtype {
    /// Spelling in the header.
    pub name: &'static str,
    /// Bits of one element; F4 and F6 share bytes.
    pub bits: u64,
}

impl StoredDtype {
    /// Looks a spelling up; `None` if the format has no such type.
    pub fn from_name(name: &str) -> Option<Self> {
        STORED_DTYPES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|&(name, bits)| Self { name, bits })
    }
}

/// The types that a K3 checkpoint is made of stand first: they are looked up
/// half a million times.
const STORED_DTYPES: [(&str, u64); 22] = [
    ("U8", 8),
    ("BF16", 16),
    ("F32", 32),
    ("BOOL", 8),
    ("F4", 4),
    ("F6_E2M3", 6),
    ("F6_E3M2", 6),
    ("I8", 8),
    ("F8_E5M2", 8),
    ("F8_E4M3", 8),
    ("F8_E8M0", 8),
    ("F8_E4M3FNUZ", 8),
    ("F8_E5M2FNUZ", 8),
    ("I16", 16),
    ("U16", 16),
    ("F16", 16),
    ("I32", 32),
    ("U32", 32),
    ("C64", 64),
    ("F64", 64),
    ("I64", 64),
    ("U64", 64),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_names_agree_with_the_format() {
        for dtype in Dtype::ALL {
            let stored = StoredDtype::from_name(dtype.name()).map(|stored| stored.bits);
            assert_eq!(stored, Some(8 * dtype.size() as u64), "{}", dtype.name());
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
        assert_eq!(Dtype::from_name("F16"), None);
        assert_eq!(StoredDtype::from_name("bf16"), None);
    }
}
