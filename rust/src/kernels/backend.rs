//! Which instruction set computes. The choice never changes a bit of a result.

use crate::error::{Error, Result};

/// An instruction set that this CPU has: holding a value proves the check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backend(Kind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Backend {
    /// Plain Rust; runs everywhere and defines every result.
    pub const SCALAR: Backend = Backend(Kind::Scalar);

    /// Every backend that this CPU can run, best first.
    pub fn available() -> Vec<Backend> {
        let mut backends = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma");
            let avx512 = std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                backends.push(Backend(Kind::Avx512));
            }
            if avx2 {
                backends.push(Backend(Kind::Avx2));
            }
        }
        backends.push(Backend::SCALAR);
        backends
    }

    /// The backend called `name`; `auto` is the best available.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] when this CPU or this build does not have it.
    pub fn named(name: &str) -> Result<Backend> {
        let available = Backend::available();
        if name == "auto" {
            return Ok(available[0]);
        }
        available.iter().copied().find(|backend| backend.name() == name).ok_or_else(|| {
            let names: Vec<_> = available.iter().map(|backend| backend.name()).collect();
            Error::invalid(
                format!("backend `{name}` is not available on this CPU"),
                format!("use one of: auto, {}", names.join(", ")),
            )
        })
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => "avx512",
        }
    }

    pub(crate) fn kind(self) -> Kind {
        self.0
    }
}

/// Defines a function whose one body is compiled for every instruction set.
///
/// IEEE 754 fixes the result of each operation, and the compiler may not
/// reorder them, so all copies give the same bits; loops over independent
/// elements are vectorised in each as far as it goes. The backend becomes the
/// first argument.
macro_rules! for_each_backend {
    ($(#[$meta:meta])* $visibility:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?)
     $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(unsafe_code, clippy::too_many_arguments)]
        $visibility fn $name(backend: $crate::kernels::backend::Backend, $($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            fn body($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $type),*) $(-> $result)? {
                body($($arg),*)
            }

            match backend.kind() {
                $crate::kernels::backend::Kind::Scalar => body($($arg),*),
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::backend::Kind::Avx2 => {
                    // SAFETY: a backend of this kind exists only after the CPU
                    // was asked for AVX2 and FMA.
                    unsafe { avx2($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::backend::Kind::Avx512 => {
                    // SAFETY: as above, and for these parts of AVX-512.
                    unsafe { avx512($($arg),*) }
                }
            }
        }
    };
}
pub(crate) use for_each_backend;
