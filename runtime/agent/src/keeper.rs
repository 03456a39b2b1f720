//! `dsec-agent keep SOCKET`: the parent of the sandboxes that stay. It launches them as the launcher does (the same orders), holds the other end
//! of each agent's channel, and carries frames between Node and agents. Node may die and come back: it connects to SOCKET, is told
//! what there is, and gets again what was sent to the one before it and not taken.
//!
//! - One Node at a time: a new connection takes the place of the old one.
//! - Per sandbox it holds the lock on the sandbox's name, so that no other command takes the sandbox for a dead one; and what agents
//!   sent until Node says that it has taken it. Beyond a limit it does not read on.
//! - It ends when no Node is connected and nothing is held. When it dies, the kernel kills its sandboxes and frees their locks.
//!
//! One thread, one loop; nothing in it waits for a peer, and a turn of it costs what is ready, not what is kept.

mod foreign;
mod wakes;

use std::collections::{HashMap, VecDeque};

use crate::cgroup;
use crate::container::{self, Failure, Stage};
use crate::oci;
use crate::order;
use crate::selfcopy;
use crate::sys::{self, Fd, POLLIN, POLLOUT};
use crate::thaw;
use crate::wire::{self, Channel, Frame, Reader, Received};
use wakes::{Source, Wakes};

/// Of frames from one agent that Node has not taken, in bytes.
const MAX_UNTAKEN: usize = 4 << 20;
/// What may wait to be sent to Node before no more is read from agents.
const BACKLOG: usize = 4 << 20;
/// An agent sends no longer one.
const MAX_FROM_AGENT: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq)]
#[repr(u8)]
enum State {
    Held = 0,
    Begun = 1,
    Running = 2,
    Ended = 3,
    Failed = 4,
}

struct Kept {
    name: Vec<u8>,
    /// Held as long as this is.
    _lock: Fd,
    state: State,
    pid: i32,
    /// It has a user namespace, and cannot get to its root by itself.
    mapped: bool,
    /// Of one by an OCI runtime, while `pid` is the runtime's.
    pid_file: Vec<u8>,
    /// It came from an OCI runtime, and may be no child of ours yet.
    is_foreign: bool,
    /// Its agent has greeted meanwhile.
    greeted: bool,
    channel: Option<Channel>,
    /// What its channel is watched for, in poll's bits.
    watched: i16,
    status: i32,
    failure: Vec<u8>,
    /// Folder of its commands' groups, once there was one.
    groups: Vec<u8>,
    /// It goes when it has ended, and nobody is told.
    forgotten: bool,
    /// Sent to Node, or to be sent to the next one.
    untaken: VecDeque<Frame>,
    untaken_bytes: usize,
}

impl Kept {
    fn kill(&self) {
        let _ = sys::send_signal(self.pid, sys::SIGKILL);
        if !self.groups.is_empty() {
            thaw::commands(&self.groups);
        }
    }
}

struct Keeper {
    wakes: Wakes,
    control: Option<Channel>,
    /// What Node's channel is watched for.
    control_watched: i16,
    listener: Fd,
    kept: HashMap<u32, Kept>,
    /// Something has happened to their channels: what they are watched for is looked at before the next wait.
    changed: Vec<u32>,
    /// Not read from while too much waits to be sent to Node.
    held_back: Vec<u32>,
    /// Somebody has been here: one that was started and never asked waits for its first Node.
    was_connected: bool,
}

pub fn main(args: &[Vec<u8>]) -> i32 {
    if let Err(errno) = selfcopy::ensure(args) {
        let _ = sys::write_all(2, format!("dsec-agent: no sealed copy of itself: errno {}\n", errno).as_bytes());
        return 1;
    }
    let _ = sys::prctl1(sys::PR_SET_DUMPABLE, 0);
    sys::name_process(b"dsec-keeper\0");
    let _ = sys::new_session();
    sys::default_signals();
    let signals = sys::every_signal();
    sys::block_signals(&signals);
    let signal_fd = match sys::signal_fd(&sys::sig_set(&[sys::SIGCHLD])) {
        Ok(fd) => fd,
        Err(_) => return 1,
    };
    sys::close_range(3, signal_fd.0 as u32 - 1, false);
    sys::close_range(signal_fd.0 as u32 + 1, u32::MAX, false);
    let _ = sys::unlink_file(&args[2]);
    let listener = match sys::listen_at(&args[2]) {
        Ok(fd) => fd,
        Err(errno) => {
            let _ = sys::write_all(2, format!("dsec-agent: cannot listen: errno {}\n", errno).as_bytes());
            return 1;
        }
    };
    // Whoever started it knows now that it listens, and none of its streams stays open in what lives on.
    let _ = sys::write_all(1, b"ready\n");
    if let Ok(null) = sys::open_at(b"/dev/null", sys::O_RDWR, 0) {
        for number in 0..3 {
            let _ = sys::dup_to(null.0, number);
        }
    }
    let wakes = match Wakes::new(&signal_fd, &listener) {
        Ok(wakes) => wakes,
        Err(_) => return 1,
    };
    let mut keeper = Keeper {
        wakes,
        control: None,
        control_watched: 0,
        listener,
        kept: HashMap::new(),
        changed: Vec::new(),
        held_back: Vec::new(),
        was_connected: false,
    };
    let status = keeper.serve(signal_fd.0);
    let _ = sys::unlink_file(&args[2]);
    status
}

impl Keeper {
    fn serve(&mut self, signal_fd: i32) -> i32 {
        loop {
            if self.control.is_none() && self.kept.is_empty() && self.was_connected {
                return 0;
            }
            self.control.iter_mut().for_each(Channel::flush);
            self.watch_changed();
            for (source, ready) in self.wakes.wait() {
                match source {
                    Source::Listener => self.accept(),
                    Source::Control => self.read_control(ready),
                    Source::Agent(id) => {
                        self.changed.push(id);
                        if self.may_read() || ready & POLLOUT != 0 {
                            self.read_agent(id, ready);
                        }
                    }
                    Source::Signals => {
                        while sys::next_signal(signal_fd).is_some() {}
                        while let Some((pid, status)) = sys::reap() {
                            self.ended(pid, status);
                        }
                    }
                }
            }
        }
    }

    fn may_read(&self) -> bool {
        self.control.as_ref().map_or(true, |control| control.waiting_bytes() < BACKLOG)
    }

    /// One that has gone would wake us for ever, so it is watched only while there is something to do with it; its end is told by SIGCHLD too.
    fn watch_changed(&mut self) {
        let sending = |channel: &Channel| if channel.is_sending() { POLLOUT } else { 0 };
        if let Some(control) = &self.control {
            let wanted = POLLIN | sending(control);
            if self.wakes.change(&control.fd, Source::Control, &mut self.control_watched, wanted).is_err() {
                self.drop_control();
            }
        }
        let may_read = self.may_read();
        if may_read {
            self.changed.append(&mut self.held_back);
        }
        for id in std::mem::take(&mut self.changed) {
            if let Some(Kept { channel: Some(channel), watched, untaken_bytes, pid, .. }) = self.kept.get_mut(&id) {
                let reading = if may_read && *untaken_bytes < MAX_UNTAKEN { POLLIN } else { 0 };
                if !may_read {
                    self.held_back.push(id);
                }
                if self.wakes.change(&channel.fd, Source::Agent(id), watched, reading | sending(channel)).is_err() {
                    // Nobody would hear it any more.
                    let _ = sys::send_signal(*pid, sys::SIGKILL);
                }
            }
        }
    }

    fn drop_control(&mut self) {
        if let Some(control) = self.control.take() {
            let _ = self.wakes.change(&control.fd, Source::Control, &mut self.control_watched, 0);
        }
    }

    fn drop_channel(&mut self, id: u32) {
        if let Some(kept) = self.kept.get_mut(&id) {
            if let Some(channel) = kept.channel.take() {
                let _ = self.wakes.change(&channel.fd, Source::Agent(id), &mut kept.watched, 0);
            }
        }
    }

    fn drop_kept(&mut self, id: u32) {
        self.drop_channel(id);
        self.kept.remove(&id);
    }

    fn tell(&mut self, kind: u8, id: u32, payload: &[u8]) {
        if let Some(control) = &mut self.control {
            control.send(kind, id, payload);
        }
    }

    fn accept(&mut self) {
        let fd = match sys::accept_one(self.listener.0) {
            Ok(fd) => fd,
            Err(_) => return,
        };
        if !matches!(sys::peer_of(fd.0), Ok(peer) if peer.uid == 0) {
            return;
        }
        self.was_connected = true;
        self.drop_control();
        self.control = Some(Channel::held(fd, 0));
        let mut ready = wire::VERSION.to_le_bytes().to_vec();
        wire::put_bytes(&mut ready, crate::BUILD.as_bytes());
        self.tell(wire::READY, sys::own_pid() as u32, &ready);
        let Keeper { control, kept, .. } = self;
        if let Some(control) = control {
            for (id, one) in kept.iter() {
                let mut payload = vec![one.state as u8];
                payload.extend_from_slice(&(one.pid as u32).to_le_bytes());
                payload.extend_from_slice(&one.status.to_le_bytes());
                wire::put_bytes(&mut payload, &one.name);
                wire::put_bytes(&mut payload, &one.failure);
                control.send(wire::KEPT, *id, &payload);
            }
            control.send(wire::ALL_KEPT, 0, &[]);
            for (id, one) in kept.iter() {
                for frame in &one.untaken {
                    send_from_agent(control, *id, frame);
                }
            }
        }
    }

    fn read_control(&mut self, ready: i16) {
        let control = match &mut self.control {
            Some(control) => control,
            None => return,
        };
        let Received { frames, open } = match control.exchange(ready, wire::MAX_PAYLOAD) {
            Some(received) => received,
            None => return,
        };
        if !open {
            self.drop_control();
            return;
        }
        for frame in frames {
            if self.handle(frame).is_none() {
                self.drop_control();
                return;
            }
        }
    }

    /// None for what cannot be understood. What is about a sandbox that has ended meanwhile is no error.
    fn handle(&mut self, frame: Frame) -> Option<()> {
        let id = frame.id;
        self.changed.push(id);
        let mut r = Reader::new(&frame.payload);
        match frame.kind {
            wire::HOLD => {
                let (name, lock) = (r.bytes()?, r.text()?);
                let errno = self.hold(id, name, &lock).err().unwrap_or(0);
                self.tell(wire::HELD, id, &errno.to_le_bytes());
            }
            wire::PREPARE => self.prepare(id, &frame.payload),
            wire::START_BY_RUNTIME => self.start_by_runtime(id, &frame.payload),
            wire::LAUNCH => {
                let begun = self.kept.get_mut(&id);
                if let Some(Kept { state: State::Begun, channel: Some(channel), mapped, pid, failure, .. }) = begun {
                    if let Err(problem) = container::send_order(channel, id, &frame.payload, *mapped) {
                        *failure = container::failure_payload(&problem);
                        let _ = sys::send_signal(*pid, sys::SIGKILL);
                    }
                }
            }
            wire::CANCEL => {
                if let Some(kept) = self.kept.get(&id) {
                    if kept.pid > 0 {
                        kept.kill();
                    }
                }
            }
            wire::TO_AGENT => {
                let (kind, about) = (r.u8()?, r.u32()?);
                if let Some(channel) = self.agent(id) {
                    channel.send(kind, about, &frame.payload[5..]);
                }
            }
            wire::TO_AGENT_IN_GROUP => {
                let folder = r.text()?;
                let (kind, about) = (r.u8()?, r.u32()?);
                let payload = &frame.payload[4 + folder.len() + 5..];
                match cgroup::command_entry(&folder) {
                    Ok(entry) => {
                        // Others are for limits.
                        if let (wire::EXEC, Some(kept)) = (kind, self.kept.get_mut(&id)) {
                            kept.groups = parent_of(&folder).to_vec();
                        }
                        if let Some(channel) = self.agent(id) {
                            channel.send_carrying(kind, about, payload, entry);
                        }
                    }
                    Err(errno) => {
                        let mut payload = vec![Stage::Cgroup as u8];
                        payload.extend_from_slice(&errno.to_le_bytes());
                        self.from_agent(id, Frame { kind: wire::REFUSED, id: about, payload });
                    }
                }
            }
            wire::TAKEN => {
                let count = r.u32()?;
                if let Some(kept) = self.kept.get_mut(&id) {
                    for _ in 0..count {
                        if let Some(frame) = kept.untaken.pop_front() {
                            kept.untaken_bytes -= frame.payload.len() + wire::HEADER;
                        }
                    }
                    if kept.untaken.is_empty() {
                        kept.untaken = VecDeque::new();
                    }
                }
            }
            wire::FORGET => {
                match self.kept.get_mut(&id) {
                    Some(kept) if kept.pid > 0 => {
                        kept.forgotten = true;
                        kept.kill();
                    }
                    _ => self.drop_kept(id),
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn agent(&mut self, id: u32) -> Option<&mut Channel> {
        match self.kept.get_mut(&id) {
            Some(kept) if kept.state == State::Running => kept.channel.as_mut(),
            _ => None,
        }
    }

    fn hold(&mut self, id: u32, name: Vec<u8>, path: &[u8]) -> sys::Result<()> {
        if self.kept.contains_key(&id) {
            return Err(sys::EEXIST);
        }
        let lock = sys::open_at(path, sys::O_RDWR | sys::O_CREAT, 0o600)?;
        sys::lock_file(lock.0)?;
        // Whoever held it before may have removed the file: a lock on what has no name keeps nobody out.
        if sys::identity_of(path)? != sys::identity_of_fd(lock.0)? {
            return Err(sys::EAGAIN);
        }
        let kept = Kept {
            name,
            _lock: lock,
            state: State::Held,
            pid: 0,
            mapped: false,
            pid_file: Vec::new(),
            is_foreign: false,
            greeted: false,
            channel: None,
            watched: 0,
            status: 0,
            failure: Vec::new(),
            groups: Vec::new(),
            forgotten: false,
            untaken: VecDeque::new(),
            untaken_bytes: 0,
        };
        self.kept.insert(id, kept);
        Ok(())
    }

    fn prepare(&mut self, id: u32, payload: &[u8]) {
        let failed = |failure: &Failure| container::failure_payload(failure);
        let refuse = |errno: i32| Failure { stage: Stage::Order, errno, what: b"order".to_vec() };
        let outcome = match (order::parse_preparation(payload), self.kept.get_mut(&id)) {
            (Some(preparation), Some(kept)) if kept.state == State::Held => {
                match container::start(&preparation, &[]) {
                    Ok((pid, channel)) => {
                        kept.pid = pid;
                        kept.channel = Some(channel);
                        kept.state = State::Begun;
                        kept.mapped = preparation.is_mapped();
                        if kept.mapped {
                            self.tell(wire::PREPARED, id, &(pid as u32).to_le_bytes());
                        }
                        Ok(())
                    }
                    Err(failure) => Err(failed(&failure)),
                }
            }
            _ => Err(failed(&refuse(sys::EINVAL))),
        };
        if let Err(payload) = outcome {
            if let Some(kept) = self.kept.get_mut(&id) {
                kept.state = State::Failed;
                kept.failure = payload.clone();
            }
            self.tell(wire::FAILED, id, &payload);
        }
    }

    fn read_agent(&mut self, id: u32, ready: i16) {
        let kept = match self.kept.get_mut(&id) {
            Some(kept) => kept,
            None => return,
        };
        let channel = match &mut kept.channel {
            Some(channel) => channel,
            None => return,
        };
        let Received { frames, open } = match channel.exchange(ready, MAX_FROM_AGENT) {
            Some(received) => received,
            None => return,
        };
        channel.fds.clear();
        if !open {
            // It has ended, or it says what no agent says.
            kept.kill();
        }
        let lost = if !open && kept.is_foreign && !oci::is_there(kept.pid) { kept.pid } else { 0 };
        if !open {
            self.drop_channel(id);
        }
        for frame in frames {
            self.from_agent(id, frame);
        }
        if lost > 0 {
            // Reaped by a process of the runtime: it was never a child of ours.
            self.ended(lost, sys::SIGKILL);
        }
    }

    fn from_agent(&mut self, id: u32, frame: Frame) {
        let kept = match self.kept.get_mut(&id) {
            Some(kept) => kept,
            None => return,
        };
        if kept.state == State::Begun {
            match frame.kind {
                wire::HELLO => self.has_greeted(id),
                // Told when nothing of it is left.
                wire::FAILED => kept.failure = frame.payload,
                _ => {}
            }
            return;
        }
        kept.untaken_bytes += frame.payload.len() + wire::HEADER;
        if let Some(control) = &mut self.control {
            send_from_agent(control, id, &frame);
        }
        kept.untaken.push_back(frame);
    }

    fn ended(&mut self, pid: i32, status: i32) {
        let id = match self.kept.iter().find(|(_, kept)| kept.pid == pid) {
            Some((id, _)) => *id,
            None => return,
        };
        if self.is_handed_over(id, status) {
            return;
        }
        if let Some(kept) = self.kept.get_mut(&id) {
            kept.is_foreign = false;
        }
        // Whatever it said before it ended.
        for _ in 0..64 {
            if !matches!(self.kept.get(&id), Some(kept) if kept.channel.is_some()) {
                break;
            }
            self.read_agent(id, POLLIN);
        }
        self.drop_channel(id);
        let kept = match self.kept.get_mut(&id) {
            Some(kept) => kept,
            None => return,
        };
        if kept.forgotten {
            self.drop_kept(id);
            return;
        }
        // Its control groups stay until Node has looked at them: they know whether memory ran out.
        kept.pid = 0;
        kept.status = status;
        if kept.failure.is_empty() {
            kept.state = State::Ended;
            self.tell(wire::ENDED, id, &status.to_le_bytes());
        } else {
            kept.state = State::Failed;
            let payload = kept.failure.clone();
            self.tell(wire::FAILED, id, &payload);
        }
    }
}

fn send_from_agent(control: &mut Channel, id: u32, frame: &Frame) {
    let mut payload = vec![frame.kind];
    payload.extend_from_slice(&frame.id.to_le_bytes());
    payload.extend_from_slice(&frame.payload);
    control.send(wire::FROM_AGENT, id, &payload);
}

fn parent_of(path: &[u8]) -> &[u8] {
    &path[..path.iter().rposition(|byte| *byte == b'/').unwrap_or(0)]
}
