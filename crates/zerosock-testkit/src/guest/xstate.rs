//! Hides the processor's extended state from a program: user-mode Linux.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// The number of ptrace(2) on x86-64.
const SYS_PTRACE: i64 = 101;
const PTRACE_GETREGSET: u64 = 0x4204;
const PTRACE_SETREGSET: u64 = 0x4205;
const NT_X86_XSTATE: u64 = 0x202;
const EINVAL: u32 = 22;

/// Becomes `argv`, without ptrace access to the processor's extended state.
pub(super) fn run(argv: &[OsString]) -> io::Result<()> {
    hide_xstate().map_err(io::Error::other)?;
    let (program, arguments) = argv
        .split_first()
        .ok_or_else(|| io::Error::other("no program to run"))?;
    Err(Command::new(program).args(arguments).exec())
}

/// Makes ptrace refuse the extended processor state, as kernels without it do.
///
/// User-mode Linux keeps its processes' registers in a buffer of fixed size. Where the processor's
/// state is larger (AVX-512 with protection keys, AMX), every process in it dies at its first
/// instruction. If ptrace refuses, it keeps the legacy 512 bytes, which suffice for programs
/// without AVX.
fn hide_xstate() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let rule = |request| -> Result<SeccompRule, seccompiler::BackendError> {
        use SeccompCmpArgLen::Qword;
        SeccompRule::new(vec![
            SeccompCondition::new(0, Qword, SeccompCmpOp::Eq, request)?,
            SeccompCondition::new(2, Qword, SeccompCmpOp::Eq, NT_X86_XSTATE)?,
        ])
    };
    let rules = vec![rule(PTRACE_GETREGSET)?, rule(PTRACE_SETREGSET)?];
    let filter = SeccompFilter::new(
        [(SYS_PTRACE, rules)].into_iter().collect(),
        SeccompAction::Allow,
        SeccompAction::Errno(EINVAL),
        TargetArch::x86_64,
    )?;
    let program: BpfProgram = filter.try_into()?;
    seccompiler::apply_filter(&program)?;
    Ok(())
}
