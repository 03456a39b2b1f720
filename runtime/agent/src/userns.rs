//! A sandbox in a user namespace: its root is somebody without any rights outside. What only the launcher may do for it is done here on the
//! launcher's side (the maps, the owner of its streams, taking hold of its root, which lies below folders of root's); what needs its own
//! root's eyes (devices, which nobody in a user namespace may make) on the other.
//!
//! The root's layers have their owners shifted into the same range before they come here (imagesvc's mapped-overlay.ts).

use crate::container::{attach_tree, clone_tree, Failure, Stage};
use crate::order::{self, Device, IdExtent, Mount};
use crate::sys::{self, c, Fd, Result};

pub const NEW_USER: u64 = 0x10000000;
pub const NEW_IPC: u64 = 0x8000000;

/// By the parent, while its child waits for its order: from here on it has ids.
pub fn write_maps(pid: i32, extents: &[IdExtent]) -> Result<()> {
    let mut text = String::new();
    for extent in extents {
        text.push_str(&format!("{} {} {}\n", extent.inside, extent.outside, extent.count));
    }
    for file in ["uid_map", "gid_map"] {
        sys::write_file(format!("/proc/{}/{}", pid, file).as_bytes(), text.as_bytes())?;
    }
    Ok(())
}

/// The streams' inodes become its root's, or it could not open its own /dev/stdout. Pipes and sockets without a name alone: anything else
/// belongs to whoever made it.
pub fn give_streams(stdio: &[Fd], extents: &[IdExtent]) {
    let root = match extents.iter().find(|extent| extent.inside == 0) {
        Some(extent) => extent.outside,
        None => return,
    };
    let own = [0, 1, 2];
    let numbers: Vec<i32> = if stdio.is_empty() { own.to_vec() } else { stdio.iter().map(|fd| fd.0).collect() };
    for fd in numbers {
        if matches!(sys::file_system_of(fd), Ok(sys::PIPEFS | sys::SOCKFS)) {
            let _ = sys::change_owner(fd, root, root);
        }
    }
}

/// A copy of the mount that an order names as its root: travels to the child with the order.
pub fn root_of_order(payload: &[u8]) -> std::result::Result<Fd, Failure> {
    let failure = |errno: i32, what: &[u8]| Failure { stage: Stage::Root, errno, what: what.to_vec() };
    let order = order::parse_order(payload).ok_or_else(|| failure(sys::EINVAL, b"order"))?;
    clone_tree(&order.root).map_err(|errno| failure(errno, &order.root))
}

/// The host's nodes, taken hold of before its root is left.
pub fn hold_devices(devices: &[Device]) -> std::result::Result<Vec<Fd>, (i32, Vec<u8>)> {
    let hold = |device: &Device| clone_tree(&device.path).map_err(|errno| (errno, device.path.clone()));
    devices.iter().map(hold).collect()
}

pub fn place_device(device: &Device, node: &Fd) -> Result<()> {
    drop(sys::open_at(&device.path, sys::O_WRONLY | sys::O_CREAT | sys::O_NOFOLLOW, 0o600)?);
    attach_tree(node.0, &device.path)?;
    const NOSUID_NOEXEC: u64 = 2 | 8;
    sys::mount_at(b"", &device.path, b"", sys::MS_REMOUNT | sys::MS_BIND | NOSUID_NOEXEC, b"")
}

/// Its own /proc and /sys: the kernel makes them in a user namespace only while those of the host can be seen as well, so before the host's
/// root is left. In the order of `mounts`; None for the others.
pub fn hold_mounts(mounts: &[Mount]) -> std::result::Result<Vec<Option<Fd>>, (i32, Vec<u8>)> {
    let hold = |mount: &Mount| match &mount.kind[..] {
        b"proc" | b"sysfs" => new_mount(&mount.kind, mount.flags).map(Some),
        _ => Ok(None),
    };
    mounts.iter().map(|mount| hold(mount).map_err(|errno| (errno, mount.target.clone()))).collect()
}

fn new_mount(kind: &[u8], flags: u64) -> Result<Fd> {
    const FSOPEN: i64 = 430;
    const FSCONFIG: i64 = 431;
    const FSMOUNT: i64 = 432;
    const FSCONFIG_SET_STRING: u32 = 1;
    const FSCONFIG_CMD_CREATE: u32 = 6;
    const CLOEXEC: u32 = 1;
    // Read-only, nosuid, nodev and noexec are the same bits here as for mount(2).
    const ATTRIBUTES: u64 = 15;
    let kind = c(kind);
    let nothing = std::ptr::null::<u8>();
    let fd = |n: i64| if n < 0 { Err(sys::errno()) } else { Ok(Fd(n as i32)) };
    unsafe {
        let context = fd(sys::syscall(FSOPEN, kind.as_ptr(), CLOEXEC))?;
        let source = c(b"source");
        if sys::syscall(FSCONFIG, context.0, FSCONFIG_SET_STRING, source.as_ptr(), kind.as_ptr(), 0) < 0
            || sys::syscall(FSCONFIG, context.0, FSCONFIG_CMD_CREATE, nothing, nothing, 0) < 0
        {
            return Err(sys::errno());
        }
        fd(sys::syscall(FSMOUNT, context.0, CLOEXEC, flags & ATTRIBUTES))
    }
}
