//! What the host asks of the guest itself, not of the agent in it: its control groups, its clock, its disk. Paths are those of the guest's first
//! root, where the sandbox can change nothing.

use crate::guest::{network, order, root};
use crate::sys::{self, Result};
use crate::wire::{self, Reader};

const READ: u8 = 1;
const WRITE: u8 = 2;
const REMOVE_FOLDER: u8 = 3;
const KILL_OTHERS: u8 = 4;
const CLOCK: u8 = 5;
const ENTROPY: u8 = 6;
const FREEZE: u8 = 7;
const THAW: u8 = 8;
const NETWORK: u8 = 9;
const HOST_NAME: u8 = 10;
const POWER_OFF: u8 = 11;
const MODULES: u8 = 12;

const READ_LIMIT: usize = 64 << 10;
const FIFREEZE: u64 = 0xc0045877;
const FITHAW: u64 = 0xc0045878;

/// None: it makes no sense.
pub fn carry_out(payload: &[u8]) -> Option<Result<Vec<u8>>> {
    let mut r = Reader::new(payload);
    let nothing = |done: Result<()>| done.map(|_| Vec::new());
    let done = match r.u8()? {
        READ => {
            let paths = r.list(|r| r.text())?;
            let mut answer = Vec::new();
            for path in paths {
                let (errno, bytes) = match sys::read_file(&path, READ_LIMIT) {
                    Ok(bytes) => (0i32, bytes),
                    Err(errno) => (errno, Vec::new()),
                };
                answer.extend_from_slice(&errno.to_le_bytes());
                wire::put_bytes(&mut answer, &bytes);
            }
            Ok(answer)
        }
        WRITE => {
            let (path, value) = (r.text()?, r.bytes()?);
            nothing(sys::write_file(&path, &value))
        }
        REMOVE_FOLDER => nothing(sys::remove_dir(&r.text()?)),
        KILL_OTHERS => {
            let (folder, kept) = (r.text()?, r.u32()?);
            nothing(kill_others(&folder, kept))
        }
        CLOCK => nothing(sys::set_clock(r.u64()?)),
        ENTROPY => nothing(sys::add_entropy(&r.bytes()?)),
        FREEZE => nothing(on_upper(FIFREEZE)),
        THAW => nothing(on_upper(FITHAW)),
        NETWORK => nothing(network::apply(&order::messages(&mut r)?).map_err(|(errno, _)| errno)),
        HOST_NAME => nothing(sys::set_host_name(&r.text()?)),
        MODULES => {
            let names = r.list(|r| r.text())?;
            nothing(names.iter().try_for_each(|name| root::load_module(name).map_err(|failure| failure.errno)))
        }
        POWER_OFF => {
            put_away();
            sys::power_off();
            Ok(Vec::new())
        }
        _ => return None,
    };
    if r.is_at_end() {
        Some(done)
    } else {
        None
    }
}

/// Of the disk with what the sandbox changed: what was written is on it, and it stands still.
fn on_upper(request: u64) -> Result<()> {
    let folder = sys::open_at(root::UPPER, sys::O_RDONLY | sys::O_DIRECTORY, 0)?;
    sys::ioctl_int(folder.0, request, 0).map(|_| ())
}

/// `kept`: a number in the sandbox's own namespace, its innermost one.
fn kill_others(folder: &[u8], kept: u32) -> Result<()> {
    let members = sys::read_file(&[folder, b"/cgroup.procs"].concat(), 1 << 20)?;
    for pid in String::from_utf8_lossy(&members).lines().filter_map(|line| line.parse::<i32>().ok()) {
        let status = sys::read_file(format!("/proc/{}/status", pid).as_bytes(), 16 << 10).unwrap_or_default();
        let status = String::from_utf8_lossy(&status).into_owned();
        let inside = status.lines().find(|line| line.starts_with("NSpid:")).and_then(|line| line.split_whitespace().last());
        if inside.and_then(|number| number.parse::<u32>().ok()) != Some(kept) {
            let _ = sys::send_signal(pid, sys::SIGKILL);
        }
    }
    Ok(())
}

pub fn out_of_memory_count() -> u64 {
    let events = sys::read_file(&[root::COMMANDS, b"/memory.events"].concat(), 4096).unwrap_or_default();
    String::from_utf8_lossy(&events)
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|count| count.parse().ok())
        .unwrap_or(0)
}

/// Before it is switched off: the disk is as a disk should be.
pub fn put_away() {
    sys::sync_all();
    let _ = on_upper(FITHAW);
    let _ = sys::detach_mount(b"/sandbox");
    if sys::unmount(root::UPPER).is_err() {
        let _ = sys::mount_at(b"", root::UPPER, b"", sys::MS_REMOUNT | sys::MS_RDONLY, b"");
    }
    sys::sync_all();
}
