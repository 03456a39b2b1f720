//! gzip for a consumer on another thread: any number of members, from one ring of memory into another. One call of
//! `dsec_gunzip_run` goes on as long as there is input and room, while the other side takes bytes out and puts bytes in; counters at
//! the beginning of the state say how far each has come. So neither waits for the other unless a ring is full or empty. Who finds
//! too little output sleeps in `dsec_gunzip_wait`.
//!
//! Each member's CRC-32 and length are verified. Zero bytes may follow the last one.
//!
//! Input may also be a part of a file (`dsec_gunzip_file`): then a run reads it as it needs it. What it has read can be kept in the ring
//! until the other side, too, has seen it.

use crate::crc32;
use crate::deflate::{Inflater, Pause, Place, WINDOW};
use std::sync::atomic::{AtomicU32, Ordering::*};

const ABI: u32 = 2;
/// Bytes are handed over in such pieces: their checksum is computed while they are in the fastest cache.
const PIECE: usize = 32 << 10;
/// Read at a time, when less than that is left. It stays in the cache until it is inflated.
const READ: usize = 128 << 10;

/// What `dsec_gunzip_run` answers: why it stopped, or what is wrong (see also deflate::problem).
const NEEDS_INPUT: i32 = 0;
const NEEDS_ROOM: i32 = 1;
const CHECKSUM: i32 = -5;
const LENGTH: i32 = -6;
const NO_HEADER: i32 = -7;
const METHOD: i32 = -8;
const FLAGS: i32 = -9;
const HEADER_CHECKSUM: i32 = -10;
const TRAILING: i32 = -11;
const MISUSE: i32 = -12;
/// The file cannot be read: `file_problem` says why.
const FILE: i32 = -13;
const EINTR: i32 = 4;

const SYS_FUTEX: i64 = 202;
const FUTEX_WAIT_PRIVATE: i32 = 128;
const FUTEX_WAKE_PRIVATE: i32 = 129;

extern "C" {
    fn syscall(number: i64, ...) -> i64;
    fn pread(fd: i32, into: *mut u8, bytes: usize, at: i64) -> isize;
    fn __errno_location() -> *mut i32;
}

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

const FHCRC: u32 = 2;
const FEXTRA: u32 = 4;
const FNAME: u32 = 8;
const FCOMMENT: u32 = 16;
const RESERVED: u32 = 0xe0;

#[repr(u32)]
#[derive(Clone, Copy, PartialEq)]
enum Part {
    /// The ten bytes that each header has.
    Head,
    ExtraLength,
    Extra,
    Name,
    Comment,
    HeaderChecksum,
    Data,
    Checksum,
    Length,
    Padding,
    Failed,
}

/// The four counters are bytes since the beginning, modulo 2^32. Each is written by one side alone.
#[repr(C)]
pub struct Gunzip {
    /// Of output: written, and given back.
    made: AtomicU32,
    taken: AtomicU32,
    /// Of input: put there, and read.
    put: AtomicU32,
    read: AtomicU32,
    /// Somebody sleeps until so many bytes of output wait, or the run ends; 0: nobody.
    wanted: AtomicU32,
    /// Counts up at either, and is what is slept on.
    news: AtomicU32,
    /// Set by who starts a run; 0 at its end.
    is_running: AtomicU32,
    /// Whether the stream may end here. For who knows that no run is under way.
    is_complete: AtomicU32,
    /// An errno. For who knows that no run is under way.
    file_problem: AtomicU32,
    /// Of the file's bytes: seen by the other side.
    seen: AtomicU32,
    /// -1: input is put into the ring by the other side.
    fd: i32,
    file_at: u64,
    file_end: u64,
    is_shown: bool,
    out: *mut u8,
    out_bytes: usize,
    input: *mut u8,
    input_bytes: usize,
    part: Part,
    members: u32,
    flags: u32,
    left: u32,
    header_crc: u32,
    crc: u32,
    /// Of the member.
    length: u64,
    inflater: Inflater,
}

impl Gunzip {
    /// A byte of a header, if there is one.
    unsafe fn byte(&mut self, at: &mut Place) -> Option<u32> {
        let byte = self.inflater.take(at, 8)?;
        self.header_crc = crc32::update(self.header_crc, &[byte as u8]);
        Some(byte)
    }

    /// One step of a header or trailer. None: more input is needed.
    unsafe fn frame(&mut self, at: &mut Place) -> Option<Result<(), i32>> {
        match self.part {
            Part::Head => {
                let byte = if self.left == 0 {
                    self.header_crc = 0;
                    let byte = self.byte(at)?;
                    if byte == 0 && self.members > 0 {
                        self.part = Part::Padding;
                        return Some(Ok(()));
                    }
                    byte
                } else {
                    self.byte(at)?
                };
                let problem = match self.left {
                    0 if byte != 0x1f => NO_HEADER,
                    1 if byte != 0x8b => NO_HEADER,
                    2 if byte != 8 => METHOD,
                    3 if byte & RESERVED != 0 => FLAGS,
                    _ => 0,
                };
                if problem != 0 {
                    return Some(Err(if self.members > 0 { TRAILING } else { problem }));
                }
                if self.left == 3 {
                    self.flags = byte;
                }
                self.left += 1;
                if self.left == 10 {
                    self.left = 0;
                    self.part = self.header_part(Part::ExtraLength);
                }
            }
            Part::ExtraLength => {
                let byte = self.byte(at)?;
                self.length |= (byte as u64) << (8 * self.left);
                self.left += 1;
                if self.left == 2 {
                    self.left = self.length as u32;
                    self.length = 0;
                    self.part = Part::Extra;
                }
            }
            Part::Extra => {
                while self.left > 0 {
                    self.byte(at)?;
                    self.left -= 1;
                }
                self.part = self.header_part(Part::Name);
            }
            Part::Name | Part::Comment => {
                while self.byte(at)? != 0 {}
                let next = if self.part == Part::Name { Part::Comment } else { Part::HeaderChecksum };
                self.part = self.header_part(next);
            }
            Part::HeaderChecksum => {
                let expected = self.header_crc & 0xffff;
                if self.inflater.take(at, 16)? != expected {
                    return Some(Err(if self.members > 0 { TRAILING } else { HEADER_CHECKSUM }));
                }
                self.part = self.header_part(Part::Data);
            }
            Part::Checksum => {
                if self.inflater.take(at, 32)? != self.crc {
                    return Some(Err(CHECKSUM));
                }
                self.part = Part::Length;
            }
            Part::Length => {
                if self.inflater.take(at, 32)? != self.length as u32 {
                    return Some(Err(LENGTH));
                }
                self.members += 1;
                self.left = 0;
                self.length = 0;
                self.part = Part::Head;
            }
            Part::Padding => {
                while self.inflater.take(at, 8)? == 0 {}
                return Some(Err(TRAILING));
            }
            Part::Data | Part::Failed => {}
        }
        Some(Ok(()))
    }

    /// The first part that this header has, from `part` on.
    fn header_part(&mut self, part: Part) -> Part {
        let has = |flag: u32| self.flags & flag != 0;
        match part {
            Part::ExtraLength if has(FEXTRA) => part,
            Part::ExtraLength | Part::Name if has(FNAME) => Part::Name,
            Part::ExtraLength | Part::Name | Part::Comment if has(FCOMMENT) => Part::Comment,
            Part::ExtraLength | Part::Name | Part::Comment | Part::HeaderChecksum if has(FHCRC) => Part::HeaderChecksum,
            _ => {
                self.inflater.begin();
                self.crc = 0;
                self.length = 0;
                Part::Data
            }
        }
    }

    fn at_boundary(&self) -> bool {
        let between = self.part == Part::Head && self.left == 0 && self.inflater.is_drained();
        self.members > 0 && (between || self.part == Part::Padding)
    }

    fn waiting(&self) -> usize {
        self.made.load(SeqCst).wrapping_sub(self.taken.load(Acquire)) as usize
    }

    unsafe fn wake(&self) {
        self.wanted.store(0, Relaxed);
        self.news.fetch_add(1, SeqCst);
        syscall(SYS_FUTEX, &self.news, FUTEX_WAKE_PRIVATE, 1);
    }

    fn input_room(&self) -> usize {
        let put = self.put.load(Relaxed);
        let unread = put.wrapping_sub(self.read.load(Relaxed));
        let unseen = if self.is_shown { put.wrapping_sub(self.seen.load(Acquire)) } else { 0 };
        self.input_bytes - unread.max(unseen) as usize
    }

    /// Puts the file's next piece into the ring, if little is left in it. False: it cannot be read. A file that is shorter than it was
    /// said to be ends early.
    unsafe fn read_file(&mut self) -> bool {
        let put = self.put.load(Relaxed);
        let there = put.wrapping_sub(self.read.load(Relaxed)) as usize;
        if there >= READ || self.file_at == self.file_end {
            return true;
        }
        let from = put as usize & (self.input_bytes - 1);
        let room = self.input_room().min(self.input_bytes - from);
        if room == 0 {
            return true;
        }
        let most = READ.min(room).min((self.file_end - self.file_at) as usize);
        let into = self.input.add(from);
        let n = loop {
            let n = pread(self.fd, into, most, self.file_at as i64);
            if n >= 0 {
                break n as usize;
            }
            let problem = *__errno_location();
            if problem != EINTR {
                self.file_problem.store(problem as u32, Relaxed);
                return false;
            }
        };
        self.file_at += n as u64;
        self.put.store(put.wrapping_add(n as u32), Release);
        if n == 0 {
            self.file_end = self.file_at;
        }
        true
    }

    unsafe fn run(&mut self) -> i32 {
        loop {
            if self.fd >= 0 && !self.read_file() {
                return FILE;
            }
            let made = self.made.load(Relaxed);
            let waiting = made.wrapping_sub(self.taken.load(Acquire)) as usize;
            // The ring behind the part of it that repeats its end, so that a match can reach back across the seam.
            let ring = self.out.add(WINDOW);
            let position = made as usize & (self.out_bytes - 1);
            let out = ring.add(position);
            let room = (self.out_bytes - waiting).min(self.out_bytes - position);
            let read = self.read.load(Relaxed);
            let there = self.put.load(Acquire).wrapping_sub(read) as usize;
            if waiting > self.out_bytes || there > self.input_bytes {
                return MISUSE;
            }
            let from = read as usize & (self.input_bytes - 1);
            let input = self.input.add(from) as *const u8;
            let mut at = Place {
                input,
                input_end: input.add(there.min(self.input_bytes - from)),
                out,
                soft: out.add(room.min(PIECE)),
                end: out.add(room),
                floor: out.sub(WINDOW.min(self.length as usize)),
            };
            let outcome = self.advance(&mut at);
            let n = at.out.offset_from(out) as usize;
            if n > 0 {
                self.crc = crc32::update(self.crc, std::slice::from_raw_parts(out, n));
                self.length += n as u64;
                if position + n == self.out_bytes {
                    std::ptr::copy_nonoverlapping(ring.add(self.out_bytes - WINDOW), self.out, WINDOW);
                }
                self.made.store(made.wrapping_add(n as u32), SeqCst);
                let wanted = self.wanted.load(SeqCst) as usize;
                if wanted > 0 && self.waiting() >= wanted {
                    self.wake();
                }
            }
            let used = at.input.offset_from(input) as usize;
            self.read.store(read.wrapping_add(used as u32), Release);
            match outcome {
                Ok(Pause::End) => {
                    self.inflater.align();
                    self.part = Part::Checksum;
                }
                Ok(Pause::Input) => {
                    let is_more = self.fd >= 0 && self.file_at < self.file_end;
                    if used == there && is_more && self.input_room() == 0 {
                        return NEEDS_ROOM;
                    }
                    if used == there && !is_more && self.put.load(Acquire) == read.wrapping_add(used as u32) {
                        self.is_complete.store(self.at_boundary() as u32, Relaxed);
                        return NEEDS_INPUT;
                    }
                }
                Ok(Pause::Output) => {
                    if self.waiting() == self.out_bytes {
                        return NEEDS_ROOM;
                    }
                }
                Ok(Pause::Problem(code)) | Err(code) => {
                    self.part = Part::Failed;
                    self.left = code as u32;
                    return code;
                }
            }
        }
    }

    unsafe fn advance(&mut self, at: &mut Place) -> Result<Pause, i32> {
        loop {
            match self.part {
                Part::Data => {
                    if self.length == 0 {
                        // The member may have begun in this call, behind another one.
                        at.floor = at.out;
                    }
                    return Ok(self.inflater.run(at));
                }
                Part::Failed => return Err(self.left as i32),
                _ => match self.frame(at) {
                    None => return Ok(Pause::Input),
                    Some(step) => step?,
                },
            }
        }
    }
}

/// The bytes of a state, if `abi` is the interface that the caller knows; else 0.
#[no_mangle]
pub extern "C" fn dsec_gunzip_bytes(abi: u32) -> u32 {
    if abi == ABI {
        std::mem::size_of::<Gunzip>() as u32
    } else {
        0
    }
}

/// `state` is zeroed and aligned to 8. Rings have a power of two of bytes; `out` has 32 KiB more, before its ring. 1 if all that is so.
#[no_mangle]
pub unsafe extern "C" fn dsec_gunzip_begin(state: *mut Gunzip, out: *mut u8, out_bytes: u64, input: *mut u8, input_bytes: u64) -> i32 {
    let fits = |bytes: u64| bytes.is_power_of_two() && bytes >= 2 * WINDOW as u64 && bytes <= 1 << 30;
    if state as usize % 8 != 0 || !fits(out_bytes) || !fits(input_bytes) {
        return 0;
    }
    let state = &mut *state;
    state.out = out;
    state.out_bytes = out_bytes as usize;
    state.input = input;
    state.input_bytes = input_bytes as usize;
    state.fd = -1;
    1
}

/// Input is this part of a file from now on. `is_shown`: the other side looks at it in the ring, and counts in `seen`. Nothing was put
/// into the ring before.
#[no_mangle]
pub unsafe extern "C" fn dsec_gunzip_file(state: *mut Gunzip, fd: i32, from: u64, end: u64, is_shown: u32) {
    let state = &mut *state;
    state.fd = fd;
    state.file_at = from;
    state.file_end = end.max(from);
    state.is_shown = is_shown != 0;
}

/// Inflates until a ring is empty or full. Not while another run goes over the same state.
#[no_mangle]
pub unsafe extern "C" fn dsec_gunzip_run(state: *mut Gunzip) -> i32 {
    let code = (*state).run();
    (*state).is_running.store(0, SeqCst);
    (*state).wake();
    code
}

/// Sleeps until so many bytes wait, or the run has ended, or `nanoseconds` (less than a second) have gone by.
#[no_mangle]
pub unsafe extern "C" fn dsec_gunzip_wait(state: *const Gunzip, bytes: u32, nanoseconds: u32) {
    let state = &*state;
    let limit = Timespec { seconds: 0, nanoseconds: nanoseconds as i64 };
    let news = state.news.load(SeqCst);
    state.wanted.store(bytes, SeqCst);
    if state.waiting() < bytes as usize && state.is_running.load(SeqCst) == 1 {
        syscall(SYS_FUTEX, &state.news, FUTEX_WAIT_PRIVATE, news, &limit);
    }
    state.wanted.store(0, SeqCst);
}
