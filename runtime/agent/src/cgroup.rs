//! A sandbox's groups, one in each hierarchy: made and filled with limits before the sandbox exists, entered by its first process
//! itself before it does anything else, removed when it has ended. Where nothing is its own it is in one that all sandboxes share.

use crate::order::Cgroup;
use crate::sys::{self, Fd, Result, EEXIST};

fn join(folder: &[u8], name: &[u8]) -> Vec<u8> {
    [folder, b"/", name].concat()
}

fn parent(folder: &[u8]) -> &[u8] {
    match folder.iter().rposition(|byte| *byte == b'/') {
        Some(at) => &folder[..at],
        None => folder,
    }
}

/// Makes all groups; what leads into each, open for writing. What was made before a failure is removed again.
pub fn make(groups: &[Cgroup]) -> std::result::Result<Vec<Fd>, (i32, Vec<u8>)> {
    let mut entries = Vec::new();
    for (i, group) in groups.iter().enumerate() {
        match make_one(group) {
            Ok(fd) => entries.push(fd),
            Err(error) => {
                drop(entries);
                remove(&groups[..i + 1]);
                return Err((error, group.folder.clone()));
            }
        }
    }
    Ok(entries)
}

fn make_one(group: &Cgroup) -> Result<Fd> {
    match sys::make_dir(&group.folder, 0o755) {
        Ok(()) | Err(EEXIST) => {}
        // The first sandbox of this boot.
        Err(sys::ENOENT) => {
            let above = parent(&group.folder);
            match sys::make_dir(above, 0o755) {
                Ok(()) | Err(EEXIST) => {}
                Err(error) => return Err(error),
            }
            sys::make_dir(&group.folder, 0o755)?;
        }
        Err(error) => return Err(error),
    }
    if group.is_cpuset {
        for folder in [parent(&group.folder), &group.folder] {
            inherit(folder, b"cpuset.cpus")?;
            inherit(folder, b"cpuset.mems")?;
        }
    }
    // Its limits are files that are there once the controllers are.
    if !group.device_program.is_empty() {
        enable_controllers(parent(&group.folder));
    }
    for (file, value) in &group.writes {
        sys::write_file(&join(&group.folder, file), value)?;
    }
    if !group.device_program.is_empty() {
        attach_device_program(group)?;
    }
    if !group.leaf.is_empty() {
        match sys::make_dir(&entered(group), 0o755) {
            Ok(()) | Err(EEXIST) => {}
            Err(error) => return Err(error),
        }
    }
    open_entry(&entered(group))
}

/// What a process writes "0" to, to be in the group. In v1 that is `tasks`, which takes one thread, and whoever enters is a process of one: for a whole
/// process (`cgroup.procs`) the kernel shuts out every fork of the machine, and waits for that, after 20 ms of quiet, 6 to 16 ms long.
fn open_entry(folder: &[u8]) -> Result<Fd> {
    match sys::open_at(&join(folder, b"tasks"), sys::O_WRONLY, 0) {
        Err(sys::ENOENT) => sys::open_at(&join(folder, b"cgroup.procs"), sys::O_WRONLY, 0),
        opened => opened,
    }
}

/// In a v2 tree no processes may be beside groups that have limits.
fn entered(group: &Cgroup) -> Vec<u8> {
    if group.leaf.is_empty() {
        group.folder.clone()
    } else {
        join(&group.folder, &group.leaf)
    }
}

fn inherit(folder: &[u8], file: &[u8]) -> Result<()> {
    let own = join(folder, file);
    let is_set = |text: &[u8]| text.iter().any(|byte| byte.is_ascii_digit());
    if is_set(&sys::read_file(&own, 65536)?) {
        return Ok(());
    }
    let above = sys::read_file(&join(parent(folder), file), 65536)?;
    sys::write_file(&own, &above)
}

/// In a v2 tree a group has those controllers that the folder above hands down. Those that cannot be had are done without.
fn enable_controllers(folder: &[u8]) {
    let has = |list: &[u8], name: &[u8]| list.split(|byte| byte.is_ascii_whitespace()).any(|word| word == name);
    for above in [parent(folder), folder] {
        let file = join(above, b"cgroup.subtree_control");
        let available = sys::read_file(&join(above, b"cgroup.controllers"), 4096).unwrap_or_default();
        let enabled = sys::read_file(&file, 4096).unwrap_or_default();
        for name in [&b"cpu"[..], b"cpuset", b"io", b"memory", b"pids"] {
            if has(&available, name) && !has(&enabled, name) {
                let _ = sys::write_file(&file, &[b"+", name].concat());
            }
        }
    }
}

/// Devices of a v2 group: a program that is asked for each open and mknod.
fn attach_device_program(group: &Cgroup) -> Result<()> {
    const BPF_PROG_LOAD: i32 = 5;
    const BPF_PROG_ATTACH: i32 = 8;
    const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
    const BPF_CGROUP_DEVICE: u32 = 6;
    const BPF_F_ALLOW_MULTI: u32 = 2;
    let license = b"Apache-2.0\0";
    let mut load = [0u8; 128];
    load[0..4].copy_from_slice(&BPF_PROG_TYPE_CGROUP_DEVICE.to_le_bytes());
    load[4..8].copy_from_slice(&((group.device_program.len() / 8) as u32).to_le_bytes());
    load[8..16].copy_from_slice(&(group.device_program.as_ptr() as u64).to_le_bytes());
    load[16..24].copy_from_slice(&(license.as_ptr() as u64).to_le_bytes());
    let program = Fd(sys::bpf(BPF_PROG_LOAD, &mut load)?);
    let folder = sys::open_at(&group.folder, sys::O_RDONLY | sys::O_DIRECTORY, 0)?;
    let mut attach = [0u8; 16];
    attach[0..4].copy_from_slice(&folder.0.to_le_bytes());
    attach[4..8].copy_from_slice(&program.0.to_le_bytes());
    attach[8..12].copy_from_slice(&BPF_CGROUP_DEVICE.to_le_bytes());
    attach[12..16].copy_from_slice(&BPF_F_ALLOW_MULTI.to_le_bytes());
    sys::bpf(BPF_PROG_ATTACH, &mut attach).map(|_| ())
}

/// By the sandbox's first process: with all it will ever start, it is in there.
pub fn enter(entries: &[Fd]) -> Result<()> {
    for entry in entries {
        sys::write_fd(entry.0, b"0")?;
    }
    Ok(())
}

/// Those that count whether memory ran out stay: whoever undoes the sandbox looks at them first.
pub fn remove_uncounted(groups: &[Cgroup]) {
    for group in groups {
        if !group.writes.iter().any(|(file, _)| file.starts_with(b"memory.")) {
            remove(std::slice::from_ref(group));
        }
    }
}

/// What is still busy stays: whoever undoes the sandbox tries again.
pub fn remove(groups: &[Cgroup]) {
    for group in groups.iter().filter(|group| !group.is_shared) {
        if !group.leaf.is_empty() {
            let _ = sys::remove_dir(&entered(group));
        }
        let _ = sys::remove_dir(&group.folder);
    }
}

/// A command's group, made by the host: nothing inside can.
pub fn command_entry(folder: &[u8]) -> Result<Fd> {
    match sys::make_dir(folder, 0o755) {
        Ok(()) | Err(sys::EEXIST) => {}
        Err(errno) => return Err(errno),
    }
    open_entry(folder)
}
