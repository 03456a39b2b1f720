//! The guest's end of its link to the host: frames in numbered packets over the virtio port, or over connections of vsock that come and go, so that neither a service that is started again, nor a
//! machine that goes on in another process, nor a connection that was cut loses a frame or brings one twice. docs/agent-protocol.md has the format;
//! the other end is runtime/vm/vm-link.ts.
//!
//! - A port of virtio-serial has no end that can be relied on: whatever comes is searched for the next packet whose checksums hold.
//! - A session is one process of the host. What a session has sent is numbered; another one begins anew, and what the one before left half is dropped.
//! - What is sent to the host has numbers of its own, for as long as the guest lives, and stays here until the host has said that it took it.

use std::collections::VecDeque;

use crate::sys::{self, Fd};
use crate::wire::{self, Frame};

const MAGIC: [u8; 4] = *b"DSv1";
const HEADER: usize = 44;
pub const HELLO: u8 = 1;
pub const WELCOME: u8 = 2;
pub const FRAMES: u8 = 3;
pub const TAKEN: u8 = 4;

/// Of a packet's payload from the host.
const MAX_FROM_HOST: usize = 64 << 10;
/// Beyond so much that the host has not taken, no more is read from the agent.
const MAX_UNTAKEN: usize = 4 << 20;

pub struct Packet {
    pub kind: u8,
    pub session: u64,
    pub number: u64,
    pub taken: u64,
    pub payload: Vec<u8>,
}

pub fn put_packet(packet: &Packet) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + packet.payload.len());
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&[packet.kind, 0, 0, 0]);
    out.extend_from_slice(&packet.session.to_le_bytes());
    out.extend_from_slice(&packet.number.to_le_bytes());
    out.extend_from_slice(&packet.taken.to_le_bytes());
    out.extend_from_slice(&(packet.payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&checksum(&packet.payload).to_le_bytes());
    let own = checksum(&out);
    out.extend_from_slice(&own.to_le_bytes());
    out.extend_from_slice(&packet.payload);
    out
}

/// What comes, searched for packets.
pub struct Parser {
    input: Vec<u8>,
}

impl Parser {
    pub fn new() -> Parser {
        Parser { input: Vec::new() }
    }

    pub fn push(&mut self, bytes: &[u8]) -> Vec<Packet> {
        self.input.extend_from_slice(bytes);
        let mut packets = Vec::new();
        let mut at = 0;
        loop {
            let left = &self.input[at..];
            // Zeros lead in a new connection: they are passed over quickly.
            let start = match left.iter().position(|byte| *byte == MAGIC[0]) {
                None => {
                    self.input.clear();
                    return packets;
                }
                Some(start) => start,
            };
            at += start;
            let left = &self.input[at..];
            if left.len() < HEADER {
                break;
            }
            match parse(left) {
                Parsed::No => at += 1,
                Parsed::More => break,
                Parsed::Whole(packet, length) => {
                    packets.push(packet);
                    at += length;
                }
            }
        }
        self.input.drain(..at);
        packets
    }
}

enum Parsed {
    No,
    More,
    Whole(Packet, usize),
}

fn parse(bytes: &[u8]) -> Parsed {
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = |at: usize| word(at) as u64 | (word(at + 4) as u64) << 32;
    if bytes[..4] != MAGIC || bytes[5..8] != [0, 0, 0] || word(40) != checksum(&bytes[..40]) {
        return Parsed::No;
    }
    let length = word(32) as usize;
    if length > MAX_FROM_HOST {
        return Parsed::No;
    }
    if bytes.len() < HEADER + length {
        return Parsed::More;
    }
    let payload = &bytes[HEADER..HEADER + length];
    if word(36) != checksum(payload) {
        return Parsed::No;
    }
    let packet = Packet { kind: bytes[4], session: long(8), number: long(16), taken: long(24), payload: payload.to_vec() };
    Parsed::Whole(packet, HEADER + length)
}

/// CRC-32, as zlib has it.
pub fn checksum(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| TABLE[((crc ^ *byte as u32) & 0xff) as usize] ^ (crc >> 8))
}

const TABLE: [u32; 256] = table();

const fn table() -> [u32; 256] {
    let mut table = [0u32; 256];
    let mut i = 0;
    while i < 256 {
        let mut value = i as u32;
        let mut bit = 0;
        while bit < 8 {
            value = if value & 1 == 1 { 0xedb88320 ^ (value >> 1) } else { value >> 1 };
            bit += 1;
        }
        table[i] = value;
        i += 1;
    }
    table
}

pub struct Link {
    /// None: a connection is yet to come.
    port: Option<Fd>,
    /// Connections, which end.
    comes_and_goes: bool,
    /// The host has said who it is, on this connection.
    is_greeted: bool,
    parser: Parser,
    /// Packets; of the first, so much is written.
    output: VecDeque<Vec<u8>>,
    written: usize,
    session: u64,
    /// Number of the host's next packet.
    expected: u64,
    /// Of frames that are not whole.
    stream: Vec<u8>,
    untaken: VecDeque<(u64, Vec<u8>)>,
    untaken_bytes: usize,
    next: u64,
    has_asked: bool,
}

impl Link {
    /// Of a port that is always there.
    pub fn new(port: Fd) -> Link {
        let mut link = Link::of_connections();
        link.connected(port);
        link.comes_and_goes = false;
        link
    }

    pub fn of_connections() -> Link {
        Link {
            port: None,
            comes_and_goes: true,
            is_greeted: false,
            parser: Parser::new(),
            output: VecDeque::new(),
            written: 0,
            session: 0,
            expected: 1,
            stream: Vec::new(),
            untaken: VecDeque::new(),
            untaken_bytes: 0,
            next: 1,
            has_asked: false,
        }
    }

    /// What was half sent or half received over the one before is sent again, by who has it.
    pub fn connected(&mut self, port: Fd) {
        self.disconnected();
        sys::set_nonblocking(port.0);
        self.port = Some(port);
    }

    fn disconnected(&mut self) {
        self.port = None;
        self.parser = Parser::new();
        self.output.clear();
        self.written = 0;
        self.is_greeted = false;
    }

    /// -1: there is none.
    pub fn fd(&self) -> i32 {
        self.port.as_ref().map_or(-1, |port| port.0)
    }

    pub fn is_sending(&self) -> bool {
        !self.output.is_empty()
    }
    pub fn is_settled(&self) -> bool {
        self.untaken.is_empty()
    }
    pub fn may_send(&self) -> bool {
        self.untaken_bytes < MAX_UNTAKEN
    }

    /// Kept until the host has taken it.
    pub fn send(&mut self, kind: u8, id: u32, payload: &[u8]) {
        let mut frame = Vec::with_capacity(wire::HEADER + payload.len());
        wire::put_frame(&mut frame, kind, id, payload);
        let number = self.next;
        self.next += 1;
        self.untaken_bytes += frame.len();
        if self.is_greeted {
            self.put(FRAMES, number, frame.clone());
        }
        self.untaken.push_back((number, frame));
        self.flush();
    }

    fn put(&mut self, kind: u8, number: u64, payload: Vec<u8>) {
        let packet = Packet { kind, session: self.session, number, taken: self.expected - 1, payload };
        self.output.push_back(put_packet(&packet));
    }

    pub fn flush(&mut self) {
        while let Some(packet) = self.output.front() {
            match sys::write_fd(self.fd(), &packet[self.written..]) {
                Ok(0) | Err(_) => return,
                Ok(n) => {
                    self.written += n;
                    if self.written >= packet.len() {
                        self.output.pop_front();
                        self.written = 0;
                    }
                }
            }
        }
    }

    /// Frames of the host that are whole now, in order. None: what it sent is no frame.
    pub fn receive(&mut self) -> Option<Vec<Frame>> {
        let mut frames = Vec::new();
        let mut part = vec![0u8; 32 << 10];
        let mut has_ended = false;
        for _ in 0..64 {
            let n = match sys::read_fd(self.fd(), &mut part) {
                Ok(n) if n > 0 => n,
                Err(sys::EAGAIN) => break,
                _ => {
                    has_ended = self.comes_and_goes;
                    break;
                }
            };
            for packet in self.parser.push(&part[..n]) {
                self.handle(packet, &mut frames)?;
            }
        }
        if has_ended {
            self.disconnected();
        } else if !frames.is_empty() {
            self.put(TAKEN, 0, Vec::new());
        }
        self.flush();
        Some(frames)
    }

    fn handle(&mut self, packet: Packet, frames: &mut Vec<Frame>) -> Option<()> {
        if packet.kind == HELLO {
            self.greet(&packet);
            return Some(());
        }
        if packet.session != self.session || !self.is_greeted {
            return Some(());
        }
        self.forget(packet.taken);
        if packet.kind != FRAMES {
            return Some(());
        }
        if packet.number == self.expected {
            self.expected += 1;
            self.has_asked = false;
            self.stream.extend_from_slice(&packet.payload);
            return self.cut(frames);
        }
        if packet.number > self.expected && !self.has_asked {
            // One was lost on its way: the host sends again what comes after what we say here.
            self.has_asked = true;
            self.welcome();
        }
        Some(())
    }

    fn greet(&mut self, packet: &Packet) {
        if packet.session == 0 {
            return;
        }
        self.is_greeted = true;
        if packet.session != self.session {
            self.session = packet.session;
            self.expected = 1;
            self.stream.clear();
        }
        self.forget(packet.taken);
        // What is half written is finished, so that the other end finds the next one; the rest is sent anew.
        if self.written > 0 {
            self.output.truncate(1);
        } else {
            self.output.clear();
        }
        self.welcome();
        let again: Vec<(u64, Vec<u8>)> = self.untaken.iter().cloned().collect();
        for (number, frame) in again {
            self.put(FRAMES, number, frame);
        }
    }

    fn welcome(&mut self) {
        let mut payload = wire::VERSION.to_le_bytes().to_vec();
        wire::put_bytes(&mut payload, crate::BUILD.as_bytes());
        let number = self.expected - 1;
        self.put(WELCOME, number, payload);
    }

    fn forget(&mut self, taken: u64) {
        while self.untaken.front().map_or(false, |(number, _)| *number <= taken) {
            if let Some((_, frame)) = self.untaken.pop_front() {
                self.untaken_bytes -= frame.len();
            }
        }
    }

    fn cut(&mut self, frames: &mut Vec<Frame>) -> Option<()> {
        let mut at = 0;
        while self.stream.len() - at >= wire::HEADER {
            let head = &self.stream[at..at + wire::HEADER];
            let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
            if length > wire::MAX_PAYLOAD {
                return None;
            }
            if self.stream.len() - at < wire::HEADER + length {
                break;
            }
            let id = u32::from_le_bytes([head[5], head[6], head[7], head[8]]);
            let payload = self.stream[at + wire::HEADER..at + wire::HEADER + length].to_vec();
            frames.push(Frame { kind: head[4], id, payload });
            at += wire::HEADER + length;
        }
        self.stream.drain(..at);
        Some(())
    }
}
