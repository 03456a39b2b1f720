//! `dsec-agent agent FD LIFETIME`: aether, the first process of a sandbox that stays. It runs commands for the host, at the other end of
//! descriptor FD, and reaps whatever is left to it; the host decides everything and keeps all output.
//!
//! - Nothing in the sandbox leads to it: no socket file, no log, no path; it cannot be traced or read (not dumpable), and as the first
//!   process of its pid namespace it gets no signal from inside.
//! - It keeps no more than it is allowed to send: of each stream the host takes a window of bytes, and says when it may have more. A command
//!   that writes on without being read waits, as at any pipe.
//! - How a command ended is told with how much it has written: what still lies in its pipes is counted, so whoever waits for all of it
//!   does not wait for children that hold the pipes open.
//! - The host gone, or what cannot be understood: it ends, and with it the sandbox.

use std::collections::HashMap;

use crate::container::Stage;
use crate::exec;
use crate::files;
use crate::sys::{self, Fd, PollFd, WinSize, POLLIN, POLLOUT};
use crate::wire::{self, Channel, Frame, Reader, Received};

/// Of one read.
const PART: usize = 32 << 10;
/// What may wait to be sent before no more is read from commands.
const BACKLOG: usize = 128 << 10;
/// A terminal says late what was written to it.
const TERMINAL_GRACE_MS: u64 = 50;
const TERMINAL_LAST_MS: u64 = 2_000;
/// How the host knows that its time was up.
const LIFETIME_OVER: i32 = 99;

pub const STDOUT: u8 = 1;
pub const STDERR: u8 = 2;

struct Output {
    fd: Fd,
    number: u8,
    sent: u64,
    /// The host takes bytes before this offset.
    limit: u64,
}

impl Output {
    fn credit(&self) -> u64 {
        self.limit.saturating_sub(self.sent)
    }
}

/// Bytes on their way into a command.
struct Input {
    fd: Fd,
    waiting: Vec<u8>,
    closing: bool,
}

struct Command {
    pid: i32,
    status: Option<Fd>,
    outputs: Vec<Output>,
    stdin: Option<Input>,
    script: Option<Input>,
    marks: Option<Fd>,
    terminal: bool,
    /// As waitpid has it; not told yet: a terminal may have more to say until then.
    ended: Option<Ended>,
    is_over: bool,
}

struct Ended {
    status: i32,
    /// When to tell it, should a terminal say nothing more until then.
    at: u64,
    /// And whatever it says: what was left behind may write to it for ever.
    last: u64,
}

struct Agent {
    channel: Channel,
    commands: HashMap<u32, Command>,
    deadline: Option<u64>,
}

pub fn main(args: &[Vec<u8>]) -> i32 {
    let _ = sys::prctl1(sys::PR_SET_DUMPABLE, 0);
    sys::name_process(b"dsec-agent\0");
    let number = |text: &[u8]| std::str::from_utf8(text).ok().and_then(|text| text.parse::<u64>().ok());
    let (fd, lifetime) = match (number(&args[2]), number(&args[3])) {
        (Some(fd), Some(lifetime)) => (fd as i32, lifetime),
        _ => return 2,
    };
    sys::default_signals();
    let signals = sys::every_signal();
    sys::block_signals(&signals);
    let signal_fd = match sys::signal_fd(&sys::sig_set(&[sys::SIGCHLD])) {
        Ok(fd) => fd,
        Err(_) => return 1,
    };
    sys::close_range(3, u32::MAX, true);
    let deadline = if lifetime == 0 { None } else { Some(sys::now_ms().saturating_add(lifetime)) };
    let mut agent = Agent { channel: Channel::new(Fd(fd), 64), commands: HashMap::new(), deadline };
    let mut hello = wire::VERSION.to_le_bytes().to_vec();
    wire::put_bytes(&mut hello, crate::BUILD.as_bytes());
    agent.channel.send(wire::HELLO, 0, &hello);
    let status = agent.serve(signal_fd.0);
    // Without closing the channel first: whoever sees it closed kills us, and how we ended would not be known.
    unsafe { sys::_exit(status) }
}

#[derive(Clone, Copy)]
enum Source {
    Channel,
    Signals,
    Status(u32),
    Output(u32, usize),
    Stdin(u32),
    Script(u32),
    Marks(u32),
}

impl Agent {
    fn serve(&mut self, signal_fd: i32) -> i32 {
        loop {
            let (mut polls, sources) = self.poll_set(signal_fd);
            sys::poll_fds(&mut polls, self.patience());
            if self.deadline.map_or(false, |at| sys::now_ms() >= at) {
                return LIFETIME_OVER;
            }
            for (poll, source) in polls.iter().zip(&sources) {
                if poll.revents == 0 {
                    continue;
                }
                match *source {
                    Source::Channel => {
                        if !self.read_channel(poll.revents) {
                            return 0;
                        }
                    }
                    Source::Signals => {
                        while sys::next_signal(signal_fd).is_some() {}
                        while let Some((pid, status)) = sys::reap() {
                            self.reaped(pid, status);
                        }
                    }
                    Source::Status(id) => self.read_status(id),
                    Source::Output(id, index) => self.read_output(id, index),
                    Source::Stdin(id) => self.write_input(id, false),
                    Source::Script(id) => self.write_input(id, true),
                    Source::Marks(id) => self.read_marks(id),
                }
            }
            self.tell_ends();
        }
    }

    fn poll_set(&self, signal_fd: i32) -> (Vec<PollFd>, Vec<Source>) {
        let mut polls = Vec::new();
        let mut sources = Vec::new();
        let mut add = |fd: i32, events: i16, source: Source| {
            polls.push(PollFd { fd, events, revents: 0 });
            sources.push(source);
        };
        add(self.channel.fd.0, if self.channel.is_sending() { POLLIN | POLLOUT } else { POLLIN }, Source::Channel);
        let may_read = self.channel.waiting_bytes() < BACKLOG;
        for (id, command) in &self.commands {
            if let Some(status) = &command.status {
                add(status.0, POLLIN, Source::Status(*id));
            }
            for (index, output) in command.outputs.iter().enumerate() {
                if may_read && output.credit() > 0 {
                    add(output.fd.0, POLLIN, Source::Output(*id, index));
                }
            }
            match &command.stdin {
                Some(input) if !input.waiting.is_empty() => add(input.fd.0, POLLOUT, Source::Stdin(*id)),
                _ => {}
            }
            match &command.script {
                Some(input) if !input.waiting.is_empty() => add(input.fd.0, POLLOUT, Source::Script(*id)),
                _ => {}
            }
            if let Some(marks) = &command.marks {
                if may_read {
                    add(marks.0, POLLIN, Source::Marks(*id));
                }
            }
        }
        // After what commands wrote before they ended.
        add(signal_fd, POLLIN, Source::Signals);
        (polls, sources)
    }

    fn patience(&self) -> i32 {
        let now = sys::now_ms();
        let mut wait: Option<u64> = self.deadline.map(|at| at.saturating_sub(now));
        for command in self.commands.values() {
            if let (Some(Ended { at, .. }), true) = (&command.ended, command.terminal) {
                // Without credit it is read from later, and that wakes us.
                if command.outputs.iter().all(|output| output.credit() > 0) {
                    let left = at.saturating_sub(now);
                    wait = Some(wait.map_or(left, |other| other.min(left)));
                }
            }
        }
        match wait {
            None => -1,
            Some(ms) => ms.min(1 << 30) as i32,
        }
    }

    fn read_channel(&mut self, ready: i16) -> bool {
        if ready & POLLOUT != 0 {
            self.channel.flush();
        }
        if ready & !POLLOUT == 0 {
            return true;
        }
        let (frames, open) = match self.channel.receive(wire::MAX_PAYLOAD) {
            Received::Frames(frames) => (frames, true),
            Received::Gone(_) => return false,
        };
        for frame in frames {
            if self.handle(&frame).is_none() {
                return false;
            }
        }
        open
    }

    /// None for what cannot be understood. A command that has ended meanwhile is no error.
    fn handle(&mut self, frame: &Frame) -> Option<()> {
        let id = frame.id;
        let mut r = Reader::new(&frame.payload);
        match frame.kind {
            wire::EXEC => return self.exec(id, exec::parse(&frame.payload)?),
            wire::FILE => {
                match files::serve(&frame.payload)? {
                    Ok(answer) => self.channel.send(wire::FILE_DONE, id, &answer),
                    Err(errno) => self.channel.send(wire::FILE_FAILED, id, &errno.to_le_bytes()),
                }
                return Some(());
            }
            wire::STDIN | wire::SCRIPT => {
                let is_script = frame.kind == wire::SCRIPT;
                if let Some(input) = self.input(id, is_script) {
                    input.waiting.extend_from_slice(&frame.payload);
                }
                self.write_input(id, is_script);
                return Some(());
            }
            wire::STDIN_CLOSE => {
                if let Some(input) = self.input(id, false) {
                    input.closing = true;
                }
                self.write_input(id, false);
            }
            wire::KILL => {
                let (number, all) = (r.u32()? as i32, r.u8()? != 0);
                if all {
                    // Of everything but this process.
                    let _ = sys::send_signal(-1, number);
                } else if let Some(Command { pid, ended: None, .. }) = self.commands.get(&id) {
                    let _ = sys::send_signal(-*pid, number);
                }
            }
            wire::RESIZE => {
                let mut size = WinSize { rows: r.u16()?, columns: r.u16()?, x: 0, y: 0 };
                if let Some(Command { terminal: true, outputs, .. }) = self.commands.get(&id) {
                    if let Some(output) = outputs.first() {
                        let _ = sys::ioctl_ptr(output.fd.0, sys::TIOCSWINSZ, &mut size);
                    }
                }
            }
            wire::CREDIT => {
                let (number, limit) = (r.u8()?, r.u64()?);
                if let Some(command) = self.commands.get_mut(&id) {
                    for output in command.outputs.iter_mut().filter(|output| output.number == number) {
                        output.limit = output.limit.max(limit);
                    }
                }
            }
            wire::WHICH => {
                let mut ids = (self.commands.len() as u32).to_le_bytes().to_vec();
                for id in self.commands.keys() {
                    ids.extend_from_slice(&id.to_le_bytes());
                }
                self.channel.send(wire::THESE, id, &ids);
            }
            wire::DROP => {
                self.commands.remove(&id);
            }
            _ => return None,
        }
        if r.is_at_end() {
            Some(())
        } else {
            None
        }
    }

    fn input(&mut self, id: u32, script: bool) -> Option<&mut Input> {
        let command = self.commands.get_mut(&id)?;
        if script {
            command.script.as_mut()
        } else {
            command.stdin.as_mut()
        }
    }

    fn exec(&mut self, id: u32, request: exec::Request) -> Option<()> {
        let group = if request.group {
            if self.channel.fds.is_empty() {
                // It came, and this process may have no more of them.
                self.refuse(id, Stage::Cgroup as u8, sys::EMFILE);
                return Some(());
            }
            Some(self.channel.fds.remove(0))
        } else {
            None
        };
        if self.commands.contains_key(&id) {
            return None;
        }
        match exec::start(&request, group) {
            Err((stage, errno)) => self.refuse(id, stage as u8, errno),
            Ok(started) => {
                let output = |fd: Fd, number: u8| Output { fd, number, sent: 0, limit: request.window as u64 };
                let mut outputs = vec![output(started.stdout, STDOUT)];
                outputs.extend(started.stderr.map(|fd| output(fd, STDERR)));
                let input = |fd: Fd| Input { fd, waiting: Vec::new(), closing: false };
                let command = Command {
                    pid: started.pid,
                    status: Some(started.status),
                    outputs,
                    stdin: started.stdin.map(input),
                    script: started.script.map(input),
                    marks: started.marks,
                    terminal: request.terminal,
                    ended: None,
                    is_over: false,
                };
                self.commands.insert(id, command);
            }
        }
        Some(())
    }

    fn refuse(&mut self, id: u32, stage: u8, errno: i32) {
        let mut payload = vec![stage];
        payload.extend_from_slice(&errno.to_le_bytes());
        self.channel.send(wire::REFUSED, id, &payload);
    }

    /// Its end is the exec; what comes before it is a failure.
    fn read_status(&mut self, id: u32) {
        let command = match self.commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let status = match &command.status {
            Some(status) => status,
            None => return,
        };
        let mut part = [0u8; 5];
        match sys::read_fd(status.0, &mut part) {
            Ok(5) => {
                self.commands.remove(&id);
                self.refuse(id, part[0], i32::from_le_bytes([part[1], part[2], part[3], part[4]]));
            }
            Err(sys::EAGAIN) => {}
            _ => {
                command.status = None;
                let pid = command.pid as u32;
                self.channel.send(wire::RUNS, id, &pid.to_le_bytes());
            }
        }
    }

    fn read_output(&mut self, id: u32, index: usize) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        // It had two when it was polled.
        let output = match command.outputs.get_mut(index) {
            Some(output) if output.credit() > 0 => output,
            _ => return,
        };
        let mut payload = vec![0u8; 9 + PART.min(output.credit() as usize)];
        match sys::read_fd(output.fd.0, &mut payload[9..]) {
            Ok(n) if n > 0 => {
                payload.truncate(9 + n);
                payload[0] = output.number;
                payload[1..9].copy_from_slice(&output.sent.to_le_bytes());
                output.sent += n as u64;
                channel.send(wire::DATA, id, &payload);
                if let Some(ended) = &mut command.ended {
                    ended.at = ended.last.min(sys::now_ms() + TERMINAL_GRACE_MS);
                }
            }
            Err(sys::EAGAIN) => {}
            // EIO of a terminal: nobody has its other end.
            _ => {
                // A terminal whose last program has closed it may be opened again, but not while it lives no more.
                let mut end = vec![output.number];
                end.extend_from_slice(&output.sent.to_le_bytes());
                channel.send(wire::END_OF_STREAM, id, &end);
                let number = output.number;
                command.outputs.retain(|output| output.number != number);
            }
        }
    }

    fn write_input(&mut self, id: u32, script: bool) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let terminal = command.terminal;
        let slot = if script { &mut command.script } else { &mut command.stdin };
        let input = match slot {
            Some(input) => input,
            None => return,
        };
        let mut taken = 0u32;
        let mut gone = false;
        while !input.waiting.is_empty() {
            match sys::write_fd(input.fd.0, &input.waiting) {
                Ok(n) => {
                    input.waiting.drain(..n);
                    taken += n as u32;
                }
                Err(sys::EAGAIN) => break,
                Err(_) => {
                    gone = true;
                    break;
                }
            }
        }
        if input.waiting.is_empty() && input.closing {
            if terminal {
                // What a user types at the beginning of a line.
                let _ = sys::write_fd(input.fd.0, &[4]);
            }
            gone = true;
        }
        if gone {
            *slot = None;
        }
        if script {
            return;
        }
        if taken > 0 {
            channel.send(wire::STDIN_TAKEN, id, &taken.to_le_bytes());
        }
        if gone {
            channel.send(wire::STDIN_GONE, id, &[]);
        }
    }

    /// With each: how much was written before it.
    fn read_marks(&mut self, id: u32) {
        let Agent { channel, commands, .. } = self;
        let command = match commands.get_mut(&id) {
            Some(command) => command,
            None => return,
        };
        let marks = match &command.marks {
            Some(marks) => marks,
            None => return,
        };
        let mut part = [0u8; 256];
        match sys::read_fd(marks.0, &mut part) {
            Err(sys::EAGAIN) => {}
            Ok(n) if n > 0 => {
                let mut payload = totals(&command.outputs);
                payload.extend_from_slice(&part[..n]);
                channel.send(wire::MARK, id, &payload);
            }
            _ => {
                command.marks = None;
                channel.send(wire::MARK, id, &totals(&command.outputs));
            }
        }
    }

    fn reaped(&mut self, pid: i32, status: i32) {
        let found = self.commands.iter().find(|(_, command)| command.pid == pid && command.ended.is_none());
        let id = match found {
            Some((id, _)) => *id,
            None => return,
        };
        // Whether it ever ran, and what it marked, comes first.
        self.read_status(id);
        self.read_marks(id);
        if let Some(command) = self.commands.get_mut(&id) {
            let now = sys::now_ms();
            command.ended = Some(Ended { status, at: now + TERMINAL_GRACE_MS, last: now + TERMINAL_LAST_MS });
            command.stdin = None;
            command.script = None;
        }
    }

    fn tell_ends(&mut self) {
        let now = sys::now_ms();
        let Agent { channel, commands, .. } = self;
        for (id, command) in commands.iter_mut() {
            let (status, at) = match &command.ended {
                Some(ended) if !command.is_over => (ended.status, ended.at),
                _ => continue,
            };
            if command.terminal && !command.outputs.is_empty() {
                let starved = command.outputs.iter().any(|output| output.credit() == 0);
                if starved || now < at {
                    continue;
                }
            }
            command.is_over = true;
            let mut payload = status.to_le_bytes().to_vec();
            payload.extend_from_slice(&totals(&command.outputs));
            channel.send(wire::EXITED, *id, &payload);
        }
        commands.retain(|_, command| !(command.is_over && command.outputs.is_empty()));
    }
}

/// Of standard output and error: what was sent and what lies in the pipe. `u64::MAX` for one that has ended: all of it.
fn totals(outputs: &[Output]) -> Vec<u8> {
    let mut out = Vec::new();
    for number in [STDOUT, STDERR] {
        let total = outputs
            .iter()
            .find(|output| output.number == number)
            .map_or(u64::MAX, |output| output.sent + sys::readable_bytes(output.fd.0));
        out.extend_from_slice(&total.to_le_bytes());
    }
    out
}
