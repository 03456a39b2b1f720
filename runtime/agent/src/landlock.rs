//! A Landlock domain around all of a sandbox: no process in it reaches one outside by a signal, a trace or an abstract socket. Namespaces part
//! them already; abstract sockets they part no more where the sandbox has the machine's network.
//!
//! What files may be opened is left to mounts: Landlock can only add what is allowed, not take /proc or /sys out of it.

use crate::sys;

const CREATE_RULESET: i64 = 444;
const RESTRICT_SELF: i64 = 446;
/// Abstract sockets and signals: Linux 6.12.
const SCOPES: u64 = 3;

/// After no_new_privs. Kernels that cannot are left as they are; `dsec doctor` says so.
pub fn restrict() {
    // handled_access_fs, handled_access_net, scoped.
    let attributes = [0u64, 0, SCOPES];
    unsafe {
        let ruleset = sys::syscall(CREATE_RULESET, attributes.as_ptr(), std::mem::size_of_val(&attributes), 0);
        if ruleset >= 0 {
            sys::syscall(RESTRICT_SELF, ruleset as i32, 0);
            sys::close_fd(ruleset as i32);
        }
    }
}
