//! The launcher runs from a sealed copy of itself in memory. The first process of a sandbox is the launcher's program until it
//! executes its command, and `/proc/self/exe` inside leads to it: a container that could write to that file would have the host's
//! program next time (CVE-2019-5736). This copy nobody can write to, root included, and it ends with the process.

use crate::sys::{self, c, Result};

const SEALS: i32 = 0x1 | 0x2 | 0x4 | 0x8;

/// Does not return when it had to start itself again.
pub fn ensure(args: &[Vec<u8>]) -> Result<()> {
    let own = sys::open_at(b"/proc/self/exe", sys::O_RDONLY, 0)?;
    if sys::seals_of(own.0).map_or(false, |seals| seals & SEALS == SEALS) {
        return Ok(());
    }
    const MFD_CLOEXEC: u32 = 1;
    const MFD_ALLOW_SEALING: u32 = 2;
    const MFD_EXEC: u32 = 0x10;
    let name = b"dsec-agent";
    // Before Linux 6.3 there is no such flag, and no need for it.
    let copy = sys::memfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_EXEC)
        .or_else(|_| sys::memfd(name, MFD_CLOEXEC | MFD_ALLOW_SEALING))?;
    let mut part = vec![0u8; 256 << 10];
    loop {
        let n = sys::read_fd(own.0, &mut part)?;
        if n == 0 {
            break;
        }
        sys::write_all(copy.0, &part[..n])?;
    }
    sys::add_seals(copy.0, SEALS)?;
    let args: Vec<_> = args.iter().map(|arg| c(arg)).collect();
    Err(sys::exec_fd(copy.0, &args, &[]))
}
