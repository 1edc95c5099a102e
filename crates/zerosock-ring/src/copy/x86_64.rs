//! Copies by inline assembly, which is opaque to the compiler.
//!
//! The unsafe functions have the contracts of those of the same names in `copy`.

use core::arch::asm;
use core::ffi::c_void;

pub(super) use copy_disjoint as copy_in;
pub(super) use copy_disjoint as copy_out;

/// Longest copy in bytes that is done word by word.
const SHORT: usize = 16;
/// Longest copy in bytes for which memcpy is not called: the call costs more than the copy.
const MEDIUM: usize = 64;

unsafe extern "C" {
    fn memcpy(dst: *mut c_void, src: *const c_void, len: usize) -> *mut c_void;
}

/// Copies one value of the register's width.
macro_rules! copy_word {
    ($class:ident, $operand:literal, $src:expr, $dst:expr) => {
        copy_word!("mov", $class, $operand, $src, $dst)
    };
    ($mov:literal, $class:ident, $operand:literal, $src:expr, $dst:expr) => {
        asm!(
            concat!($mov, " ", $operand, ", [{src}]"),
            concat!($mov, " [{dst}], ", $operand),
            word = out($class) _,
            src = in(reg) $src,
            dst = in(reg) $dst,
            options(nostack, preserves_flags)
        )
    };
}

#[inline(always)]
pub(super) unsafe fn copy_disjoint(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: every word lies within `len` bytes of both ranges, by the preceding comparison. Where
    // the last word covers bytes of the one before, both ranges still have those, since they do not
    // overlap. A block without `nostack` may call a function, and memcpy changes what a C function
    // may change.
    unsafe {
        if len > SHORT && len <= MEDIUM {
            copy_word!("movups", xmm_reg, "{word}", src, dst);
            if len > 2 * SHORT {
                let at = SHORT;
                copy_word!("movups", xmm_reg, "{word}", src.add(at), dst.add(at));
                let at = len - 2 * SHORT;
                copy_word!("movups", xmm_reg, "{word}", src.add(at), dst.add(at));
            }
            let at = len - SHORT;
            copy_word!("movups", xmm_reg, "{word}", src.add(at), dst.add(at));
        } else if len > SHORT {
            asm!(
                "call {memcpy}",
                memcpy = sym memcpy,
                inout("rdi") dst => _,
                inout("rsi") src => _,
                inout("rdx") len => _,
                clobber_abi("C")
            );
        } else if len >= 8 {
            let mut at = 0;
            while at + 8 <= len {
                copy_word!(reg, "{word}", src.add(at), dst.add(at));
                at += 8;
            }
            if at < len {
                copy_word!(reg, "{word}", src.add(len - 8), dst.add(len - 8));
            }
        } else if len >= 4 {
            copy_word!(reg, "{word:e}", src, dst);
            if len > 4 {
                copy_word!(reg, "{word:e}", src.add(len - 4), dst.add(len - 4));
            }
        } else {
            // An index of a ring has two bytes, and must be seen whole.
            if len >= 2 {
                copy_word!(reg, "{word:x}", src, dst);
            }
            if len % 2 == 1 {
                copy_word!(reg_byte, "{word}", src.add(len - 1), dst.add(len - 1));
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn load(at: *const u8) -> u64 {
    let word;
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!(
            "mov {0}, [{1}]",
            out(reg) word,
            in(reg) at,
            options(nostack, preserves_flags, readonly)
        );
    }
    word
}

#[inline(always)]
pub(super) unsafe fn store(at: *mut u8, word: u64) {
    // SAFETY: the caller vouches for the address.
    unsafe {
        asm!(
            "mov [{0}], {1}",
            in(reg) at,
            in(reg) word,
            options(nostack, preserves_flags)
        );
    }
}
