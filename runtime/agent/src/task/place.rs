//! Where a task runs: namespaces of its own with a root that nobody can write to, and folders of its own that are empty.
//!
//! All private folders are parts of one tmpfs, so one size holds all of them, and it goes with the namespace. /proc is that of the task's pid namespace,
//! masked as in a sandbox; the container's own /proc has no masks, or the kernel would not allow another one in a user namespace.

use super::Plan;
use crate::container::{At, Stage, Step};
use crate::sys::{self, c, Result};

/// Once, before there is any task: nothing in the root can be planted from here on.
pub fn seal_root() -> Result<()> {
    const MOUNT_SETATTR: i64 = 442;
    const MOUNT_ATTR_RDONLY: u64 = 1;
    let attributes = [MOUNT_ATTR_RDONLY, 0, 0, 0];
    let root = c(b"/");
    const AT_FDCWD: i32 = -100;
    let done = unsafe { sys::syscall(MOUNT_SETATTR, AT_FDCWD, root.as_ptr(), 0, attributes.as_ptr(), 32usize) };
    if done < 0 {
        Err(sys::errno())
    } else {
        Ok(())
    }
}

const NOSUID_NODEV: u64 = 2 | 4;
const NOEXEC: u64 = 8;

/// By the first process of the new namespaces.
pub fn make(plan: &Plan) -> Step {
    let at = |done: Result<()>, path: &[u8]| done.at(Stage::Mount, path);
    at(sys::mount_at(b"", b"/", b"", sys::MS_REC | sys::MS_PRIVATE, b""), b"/")?;
    at(make_private(plan), b"private folders")?;
    at(sys::mount_at(b"proc", b"/proc", b"proc", NOSUID_NODEV | NOEXEC, b""), b"/proc")?;
    at(sys::mount_at(b"mqueue", b"/dev/mqueue", b"mqueue", NOSUID_NODEV | NOEXEC, b""), b"/dev/mqueue")?;
    hide(plan)?;
    if plan.namespaces & NEW_NETWORK != 0 {
        crate::container::raise_loopback().at(Stage::Network, b"lo")?;
    }
    Ok(())
}

const NEW_NETWORK: u64 = 0x40000000;
/// Whose root the tmpfs is seen at before it is hidden: always the first private folder.
fn make_private(plan: &Plan) -> Result<()> {
    let stage = match plan.private.first() {
        None => return Ok(()),
        Some((path, _)) => path,
    };
    let options = format!("mode=755,size={},nr_inodes={}", plan.tmpfs_bytes, plan.inodes);
    sys::mount_at(b"tmpfs", stage, b"tmpfs", NOSUID_NODEV, options.as_bytes())?;
    // The first one last: until then the others are seen below it.
    for (number, (target, mode)) in plan.private.iter().enumerate().rev() {
        let part = [stage, &b"/"[..], number.to_string().as_bytes()].concat();
        sys::make_dir(&part, *mode)?;
        let folder = sys::open_at(&part, sys::O_RDONLY | sys::O_DIRECTORY, 0)?;
        sys::change_mode(folder.0, *mode)?;
        if mode & 0o1000 == 0 {
            sys::change_owner(folder.0, plan.uid, plan.gid)?;
        }
        match sys::mount_at(&part, target, b"", sys::MS_BIND, b"") {
            // An image without that folder.
            Err(sys::ENOENT) => {}
            done => done?,
        }
    }
    Ok(())
}

/// As fill.rs hides, of /proc alone.
fn hide(plan: &Plan) -> Step {
    let hidden = NOSUID_NODEV | NOEXEC;
    for path in &plan.masked {
        let done = match sys::mode_of(path, false) {
            Err(_) => continue,
            Ok(mode) if mode & sys::S_IFMT == sys::S_IFDIR => {
                sys::mount_at(b"tmpfs", path, b"tmpfs", sys::MS_RDONLY | hidden, b"size=0k")
            }
            Ok(_) => sys::mount_at(b"/dev/null", path, b"", sys::MS_BIND, b""),
        };
        done.at(Stage::Mask, path)?;
    }
    for path in &plan.read_only {
        match sys::mount_at(path, path, b"", sys::MS_BIND | sys::MS_REC, b"") {
            Err(sys::ENOENT) => continue,
            done => done.at(Stage::Mask, path)?,
        }
        let flags = sys::MS_REMOUNT | sys::MS_BIND | sys::MS_RDONLY | hidden;
        sys::mount_at(b"", path, b"", flags, b"").at(Stage::Mask, path)?;
    }
    Ok(())
}

/// Another size for this task. The first private folder is a bind into it.
pub fn resize(plan: &Plan, bytes: u64) -> Step {
    let (stage, _) = match plan.private.first() {
        Some(first) if bytes != 0 && bytes != plan.tmpfs_bytes => first,
        _ => return Ok(()),
    };
    let options = format!("size={}", bytes);
    sys::mount_at(b"", stage, b"", sys::MS_REMOUNT | NOSUID_NODEV, options.as_bytes()).at(Stage::Limit, b"of its folders")
}
