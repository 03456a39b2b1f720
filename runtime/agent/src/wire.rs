//! Frames on a stream socket, and how values stand in their payloads. docs/agent-protocol.md is the specification; the other end
//! is runtime/backend/agent-wire.ts.
//!
//!     frame   u32 length of the payload, u8 type, u32 id, payload; all little-endian
//!     bytes   u32 length, then the bytes
//!     list    u32 count, then the items
//!
//! Whatever does not parse ends the connection it came on: no length is believed beyond the limit, nothing is allocated for a
//! count before its items are there.

use std::collections::VecDeque;

use crate::sys::{self, Fd, EAGAIN, POLLOUT};

pub const HEADER: usize = 9;
/// Of a payload. An order holds an environment and arguments, which the kernel limits to about two megabytes.
pub const MAX_PAYLOAD: usize = 8 << 20;

/// Of the orders, of the client's greeting, of everything: both ends must say the same.
pub const VERSION: u32 = 3;

/// Node to launcher.
pub const LAUNCH: u8 = 1;
pub const TO_CLIENT: u8 = 2;
pub const CLOSE_LISTENER: u8 = 3;
pub const PREPARE: u8 = 4;
pub const CANCEL: u8 = 5;
/// Node to keeper, beside PREPARE, LAUNCH and CANCEL.
pub const HOLD: u8 = 6;
pub const TO_AGENT: u8 = 7;
pub const TO_AGENT_IN_GROUP: u8 = 8;
pub const TAKEN: u8 = 9;
pub const FORGET: u8 = 10;
pub const START_BY_RUNTIME: u8 = 11;
/// Node to a guest's first process, beside LAUNCH, CANCEL, TO_AGENT and TO_AGENT_IN_GROUP.
pub const GUEST_WORK: u8 = 12;
/// Launcher to Node.
pub const READY: u8 = 100;
pub const STARTED: u8 = 101;
pub const ENDED: u8 = 102;
pub const FAILED: u8 = 103;
/// Keeper to Node, beside READY, STARTED, ENDED and FAILED.
pub const HELD: u8 = 104;
pub const KEPT: u8 = 105;
pub const ALL_KEPT: u8 = 106;
pub const FROM_AGENT: u8 = 107;
/// Both to Node: the process of a sandbox with a user namespace is there, and waits for its order.
pub const PREPARED: u8 = 108;
/// A guest's first process to Node, beside STARTED, ENDED, FAILED and FROM_AGENT.
pub const GUEST_DONE: u8 = 109;
pub const OUT_OF_MEMORY: u8 = 114;
/// Launcher to Node about clients.
pub const CLIENT: u8 = 110;
pub const CLIENT_SIGNAL: u8 = 111;
pub const CLIENT_GONE: u8 = 112;
/// Its input, and what it took of its output: the type of the client's frame, then its payload.
pub const CLIENT_STREAM: u8 = 113;
/// Client to service.
pub const GREETING: u8 = 30;
pub const SIGNAL: u8 = 31;
pub const INPUT: u8 = 32;
pub const INPUT_END: u8 = 33;
pub const OUTPUT_TAKEN: u8 = 34;
/// Service to client.
pub const DECLINED: u8 = 40;
pub const ACCEPTED: u8 = 41;
pub const OUTPUT: u8 = 42;
pub const EXIT: u8 = 43;
pub const TERMINAL: u8 = 44;
pub const INPUT_WANTED: u8 = 45;
/// Host to agent; the id is the command's, or the request's.
pub const EXEC: u8 = 50;
pub const STDIN: u8 = 51;
pub const STDIN_CLOSE: u8 = 52;
pub const KILL: u8 = 53;
pub const RESIZE: u8 = 54;
pub const CREDIT: u8 = 55;
pub const DROP: u8 = 56;
pub const SCRIPT: u8 = 57;
pub const WHICH: u8 = 58;
pub const GROUP: u8 = 59;
pub const FILE: u8 = 60;
/// Connections to ports inside.
pub const CONNECT: u8 = 61;
pub const SEND: u8 = 62;
pub const SEND_END: u8 = 63;
/// Of connections and watches.
pub const TAKE: u8 = 64;
pub const CLOSE: u8 = 65;
pub const WATCH: u8 = 66;
pub const LIFETIME: u8 = 67;
/// Host to what takes tasks (task.rs); the id means nothing.
pub const CONFIGURE: u8 = 90;
pub const TASK_FILE: u8 = 91;
pub const TASK: u8 = 92;
/// And back, after a HELLO.
pub const TASK_READY: u8 = 190;
pub const STEP_DONE: u8 = 191;
pub const STEP_NOT_RUN: u8 = 192;
pub const TASK_FETCHED: u8 = 193;
pub const TASK_END: u8 = 194;
pub const TASK_CLEANED: u8 = 195;
pub const TASK_FAILED: u8 = 196;
pub const TASK_BEGUN: u8 = 197;
/// Agent to host.
pub const HELLO: u8 = 150;
pub const RUNS: u8 = 151;
pub const REFUSED: u8 = 152;
pub const DATA: u8 = 153;
pub const EXITED: u8 = 154;
pub const END_OF_STREAM: u8 = 155;
pub const STDIN_TAKEN: u8 = 156;
pub const STDIN_GONE: u8 = 157;
pub const MARK: u8 = 158;
pub const THESE: u8 = 159;
pub const FILE_DONE: u8 = 160;
pub const FILE_FAILED: u8 = 161;
pub const CONNECTED: u8 = 162;
pub const RECEIVED: u8 = 163;
pub const RECEIVED_END: u8 = 164;
pub const SENT: u8 = 165;
/// Of connections and watches.
pub const CLOSED: u8 = 166;
pub const WATCHES: u8 = 167;
pub const EVENTS: u8 = 168;

pub struct Frame {
    pub kind: u8,
    pub id: u32,
    pub payload: Vec<u8>,
}

pub fn put_frame(out: &mut Vec<u8>, kind: u8, id: u32, payload: &[u8]) {
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.push(kind);
    out.extend_from_slice(&id.to_le_bytes());
    out.extend_from_slice(payload);
}

pub fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

/// A payload being read. Every method is None at its end.
pub struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { bytes }
    }
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        if n > self.bytes.len() {
            return None;
        }
        let (head, rest) = self.bytes.split_at(n);
        self.bytes = rest;
        Some(head)
    }
    pub fn u8(&mut self) -> Option<u8> {
        self.take(1).map(|b| b[0])
    }
    pub fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
    }
    pub fn u32(&mut self) -> Option<u32> {
        self.take(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
    pub fn u64(&mut self) -> Option<u64> {
        let low = self.u32()? as u64;
        Some(low | (self.u32()? as u64) << 32)
    }
    pub fn bytes(&mut self) -> Option<Vec<u8>> {
        let n = self.u32()? as usize;
        self.take(n).map(|b| b.to_vec())
    }
    /// For the kernel: without a NUL byte, which would cut it short.
    pub fn text(&mut self) -> Option<Vec<u8>> {
        self.bytes().filter(|bytes| !bytes.contains(&0))
    }
    pub fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()?;
        let mut out = Vec::new();
        for _ in 0..count {
            out.push(item(self)?);
        }
        Some(out)
    }
    pub fn is_at_end(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// One end of a stream socket: frames in, frames out, neither ever waiting. Descriptors that come are kept until they are taken.
pub struct Channel {
    pub fd: Fd,
    input: Vec<u8>,
    output: Vec<u8>,
    written: usize,
    /// Where in `output` the frames begin that carry a descriptor, in order.
    carried: VecDeque<(usize, Fd)>,
    pub fds: Vec<Fd>,
    max_fds: usize,
    held: bool,
}

pub struct Received {
    pub frames: Vec<Frame>,
    /// False: the other end has gone, or sent what no frame can be.
    pub open: bool,
}

impl Channel {
    /// `max_fds`: more than that are closed as they come.
    pub fn new(fd: Fd, max_fds: usize) -> Channel {
        sys::set_nonblocking(fd.0);
        Channel {
            fd,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            carried: VecDeque::new(),
            fds: Vec::new(),
            max_fds,
            held: false,
        }
    }

    /// What is sent waits for `flush`, which whoever has it calls once for all that a turn has to say.
    pub fn held(fd: Fd, max_fds: usize) -> Channel {
        Channel { held: true, ..Channel::new(fd, max_fds) }
    }

    /// What poll said of it: sends what waits, takes what came. None: nothing came.
    pub fn exchange(&mut self, ready: i16, limit: usize) -> Option<Received> {
        if ready & POLLOUT != 0 {
            self.flush();
        }
        if ready & !POLLOUT == 0 {
            return None;
        }
        Some(self.receive(limit))
    }

    pub fn receive(&mut self, limit: usize) -> Received {
        let mut frames = Vec::new();
        let mut part = vec![0u8; 64 << 10];
        // Bounded, so that one that never stops sending does not hold up the others.
        for _ in 0..16 {
            match sys::receive_with_fds(self.fd.0, &mut part, 0) {
                Ok((0, _)) => return Received { frames, open: false },
                Ok((n, fds)) => {
                    self.input.extend_from_slice(&part[..n]);
                    for fd in fds {
                        if self.fds.len() < self.max_fds {
                            self.fds.push(fd);
                        }
                    }
                    if !self.cut(&mut frames, limit) {
                        return Received { frames, open: false };
                    }
                    if n < part.len() {
                        break;
                    }
                }
                Err(EAGAIN) => break,
                Err(_) => return Received { frames, open: false },
            }
        }
        Received { frames, open: true }
    }

    fn cut(&mut self, frames: &mut Vec<Frame>, limit: usize) -> bool {
        let mut at = 0;
        while self.input.len() - at >= HEADER {
            let head = &self.input[at..at + HEADER];
            let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            if length > limit {
                return false;
            }
            if self.input.len() - at < HEADER + length {
                break;
            }
            let id = u32::from_le_bytes([head[5], head[6], head[7], head[8]]);
            let payload = self.input[at + HEADER..at + HEADER + length].to_vec();
            frames.push(Frame { kind: head[4], id, payload });
            at += HEADER + length;
        }
        self.input.drain(..at);
        if self.input.is_empty() && self.input.capacity() > KEPT_CAPACITY {
            self.input = Vec::new();
        }
        true
    }

    pub fn send(&mut self, kind: u8, id: u32, payload: &[u8]) {
        put_frame(&mut self.output, kind, id, payload);
        if !self.held || self.waiting_bytes() > HELD_BYTES {
            self.flush();
        }
    }

    /// A frame that carries a descriptor: it arrives with the frame's first byte.
    pub fn send_carrying(&mut self, kind: u8, id: u32, payload: &[u8], fd: Fd) {
        self.carried.push_back((self.output.len(), fd));
        put_frame(&mut self.output, kind, id, payload);
        self.flush();
    }

    /// At once, or not at all when the other end does not read.
    pub fn send_fd(&mut self, kind: u8, id: u32, fd: i32) {
        self.flush();
        let mut frame = Vec::new();
        put_frame(&mut frame, kind, id, &[]);
        if self.is_sending() || sys::send_with_fds(self.fd.0, &frame, &[fd]) != Ok(frame.len()) {
            self.output.extend_from_slice(&frame);
        }
    }

    pub fn is_sending(&self) -> bool {
        self.written < self.output.len()
    }

    pub fn waiting_bytes(&self) -> usize {
        self.output.len() - self.written
    }

    /// Errors show when it is read from.
    pub fn flush(&mut self) {
        while self.is_sending() {
            let mut end = self.output.len();
            let mut carried = [0i32; 1];
            let mut count = 0;
            let mut marks = self.carried.iter();
            if let Some((at, fd)) = marks.next() {
                if *at == self.written {
                    carried[0] = fd.0;
                    count = 1;
                    end = marks.next().map_or(end, |(next, _)| *next);
                } else {
                    end = *at;
                }
            }
            match sys::send_with_fds(self.fd.0, &self.output[self.written..end], &carried[..count]) {
                Ok(n) => {
                    self.written += n;
                    if count > 0 {
                        self.carried.pop_front();
                    }
                }
                Err(_) => {
                    self.trim();
                    return;
                }
            }
        }
        self.output.clear();
        self.written = 0;
        if self.output.capacity() > KEPT_CAPACITY {
            self.output = Vec::new();
        }
    }

    /// What was sent of a long queue is given back.
    fn trim(&mut self) {
        if self.written > (1 << 20) {
            self.output.drain(..self.written);
            for (at, _) in self.carried.iter_mut() {
                *at -= self.written;
            }
            self.written = 0;
        }
    }
}

/// More is sent at once.
const HELD_BYTES: usize = 32 << 10;
/// A buffer that was needed once is not kept for ever: there are two for each sandbox, in its agent and in the keeper.
const KEPT_CAPACITY: usize = 4 << 10;
