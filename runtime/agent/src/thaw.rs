//! Commands of a sandbox that stand still (runtime/aether/freeze.ts) go on, so that they can end: in cgroup v1 a frozen process takes no
//! SIGKILL, and its agent would not end before it. Whoever froze them may be dead.

use std::os::unix::ffi::OsStrExt;

use crate::sys;

/// `parent`: the folder in which each command has its group, `c` and a number.
pub fn commands(parent: &[u8]) {
    let folders = match std::fs::read_dir(std::ffi::OsStr::from_bytes(parent)) {
        Ok(folders) => folders,
        Err(_) => return,
    };
    for folder in folders.flatten() {
        let path = folder.path();
        let name = folder.file_name();
        let is_command = name.len() > 1 && name.as_bytes()[0] == b'c' && name.as_bytes()[1..].iter().all(u8::is_ascii_digit);
        if !is_command {
            continue;
        }
        // One of them is there.
        for (file, value) in [(&b"/freezer.state"[..], &b"THAWED"[..]), (b"/cgroup.freeze", b"0")] {
            let _ = sys::write_file(&[path.as_os_str().as_bytes(), file].concat(), value);
        }
    }
}
