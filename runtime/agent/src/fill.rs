//! What a sandbox's root is filled with once it is entered: mounts, devices, and masks over what is not to be seen.

use crate::container::{attach_tree, At, Stage, Step};
use crate::order::{Mount, Order};
use crate::sys::{self, Fd, Result};
use crate::userns;

/// For each file system there is, every memory group of the machine holds some of the kernel's memory. So what can be a part of another is one.
pub fn mount_one(mount: &Mount, made: Option<&Fd>) -> Result<()> {
    if mount.kind == b"folder" {
        return mount_folder(mount);
    }
    match sys::mode_of(&mount.target, false) {
        Ok(mode) if mode & sys::S_IFMT == sys::S_IFDIR => {}
        // What is masked, and by what, is found by its path: that must be the mount's own.
        Ok(_) => return Err(sys::ENOTDIR),
        Err(sys::ENOENT) => sys::make_dir(&mount.target, 0o755)?,
        Err(error) => return Err(error),
    }
    match made {
        Some(tree) => attach_tree(tree.0, &mount.target),
        None => sys::mount_at(&mount.source, &mount.target, &mount.kind, mount.flags, &mount.data),
    }
}

/// A folder of what is mounted above it, with flags of its own. `data` is its mode, octal.
fn mount_folder(mount: &Mount) -> Result<()> {
    let mode = std::str::from_utf8(&mount.data).ok().and_then(|text| u32::from_str_radix(text, 8).ok());
    sys::make_dir(&mount.target, mode.ok_or(sys::EINVAL)?)?;
    bind_onto(&mount.target, &mount.target, mount.flags)
}

fn bind_onto(source: &[u8], target: &[u8], flags: u64) -> Result<()> {
    sys::mount_at(source, target, b"", sys::MS_BIND, b"")?;
    sys::mount_at(b"", target, b"", sys::MS_REMOUNT | sys::MS_BIND | flags, b"")
}

pub fn make_devices(order: &Order, held: &[Fd]) -> Step {
    // /dev is new and empty: what is there already would be somebody else's.
    for (i, device) in order.devices.iter().enumerate() {
        let end = device.path.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        if &device.path[..end] != b"/dev" {
            match sys::make_dir(&device.path[..end], 0o755) {
                Ok(()) | Err(sys::EEXIST) => {}
                Err(errno) => return Err(errno).at(Stage::Device, &device.path),
            }
        }
        if let Some(node) = held.get(i) {
            userns::place_device(device, node).at(Stage::Device, &device.path)?;
            continue;
        }
        let mode = sys::S_IFCHR | device.mode;
        sys::make_node(&device.path, mode, device.major, device.minor).at(Stage::Device, &device.path)?;
    }
    for (path, target) in &order.links {
        sys::make_symlink(target, path).at(Stage::Device, path)?;
    }
    Ok(())
}

/// In the sandbox's own /sys a folder that the kernel keeps empty: for others to be mounted on.
const EMPTY: &[u8] = b"/sys/fs/cgroup";

/// Masked: a file reads as nothing, a folder is empty. What a kernel does not have needs no mask.
pub fn hide(order: &Order) -> Step {
    const HIDDEN: u64 = 2 | 4 | 8; // nosuid, nodev, noexec
    for path in &order.masked {
        match sys::mode_of(path, false) {
            Err(sys::ENOENT) | Err(sys::ENOTDIR) => continue,
            Err(errno) => return Err(errno).at(Stage::Mask, path),
            Ok(mode) if mode & sys::S_IFMT == sys::S_IFDIR => {
                bind_onto(EMPTY, path, sys::MS_RDONLY | HIDDEN).at(Stage::Mask, path)?;
            }
            Ok(_) => bind_onto(b"/dev/null", path, sys::MS_RDONLY | 2 | 8).at(Stage::Mask, path)?,
        }
    }
    for path in &order.read_only {
        match sys::mount_at(path, path, b"", sys::MS_BIND | sys::MS_REC, b"") {
            Err(sys::ENOENT) | Err(sys::ENOTDIR) => continue,
            done => done.at(Stage::Mask, path)?,
        }
        let flags = sys::MS_REMOUNT | sys::MS_BIND | sys::MS_RDONLY | HIDDEN;
        sys::mount_at(b"", path, b"", flags, b"").at(Stage::Mask, path)?;
    }
    Ok(())
}
