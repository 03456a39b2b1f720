//! Inflates deflate blocks (RFC 1951), as far as the input at hand and the room for output go, and goes on from there the next time.
//!
//! Input at hand is taken whole: what is not used yet is in `bits`. So a symbol that is cut by the end of the input waits there,
//! undecided. Here every bit and byte is counted, as must be near both ends; far from them `hot_loop.rs` goes on.

use crate::huffman::*;
use std::ptr::copy_nonoverlapping;

/// How far a match may reach back.
pub const WINDOW: usize = 32 << 10;
const MAX_MATCH: usize = 258;
/// What one turn of the hot loop may write: three literals, a match, and what its last piece has too much.
const HOT_OUT: usize = 3 + MAX_MATCH + 48;
/// What one turn of it may read.
const HOT_IN: usize = 32;

const PRECODE_ORDER: [u8; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];

/// What is wrong with a stream; the numbers are part of the interface.
pub mod problem {
    pub const BLOCK: i32 = -1;
    pub const SYMBOL: i32 = -2;
    pub const DISTANCE: i32 = -3;
    pub const CODE: i32 = -4;
}

pub enum Pause {
    /// All of it is taken, and more is needed.
    Input,
    /// `soft` is reached, or no room is left.
    Output,
    /// The stream's last block has ended.
    End,
    Problem(i32),
}

#[repr(u32)]
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Block,
    StoredLength,
    Stored,
    Counts,
    Precode,
    Lengths,
    Symbols,
    End,
}

/// Where the input is read and the output is written, for one call.
pub struct Place {
    pub input: *const u8,
    pub input_end: *const u8,
    pub out: *mut u8,
    /// A pause may be made from here on.
    pub soft: *mut u8,
    /// Nothing is written here or behind it.
    pub end: *mut u8,
    /// The first byte that a match may reach.
    pub floor: *const u8,
}

#[repr(C)]
pub struct Inflater {
    pub bits: u64,
    pub bit_count: u32,
    step: Step,
    is_last: u32,
    /// Of a stored block: bytes to come. Of lengths: how many there are by now.
    left: u32,
    /// Of a match that has no room yet.
    match_length: u32,
    match_distance: u32,
    length_codes: u32,
    distance_codes: u32,
    precode_codes: u32,
    lengths: [u8; 320],
    precode: [u32; 1 << PRECODE_BITS],
    pub length_table: [u32; LENGTH_ENTRIES],
    pub distance_table: [u32; DISTANCE_ENTRIES],
}

impl Inflater {
    /// A new stream begins behind the bits that were taken last.
    pub fn begin(&mut self) {
        self.step = Step::Block;
        self.match_length = 0;
    }

    /// `n` bits (32 at most), if they are there; taken from the input then. Bytes that come too early are kept.
    #[inline(always)]
    pub unsafe fn take(&mut self, at: &mut Place, n: u32) -> Option<u32> {
        self.fill(at);
        if self.bit_count < n {
            return None;
        }
        let value = (self.bits & ((1u64 << n) - 1)) as u32;
        self.drop_bits(n);
        Some(value)
    }

    #[inline(always)]
    unsafe fn fill(&mut self, at: &mut Place) {
        while self.bit_count <= 56 && at.input < at.input_end {
            self.bits |= (*at.input as u64) << self.bit_count;
            self.bit_count += 8;
            at.input = at.input.add(1);
        }
    }

    #[inline(always)]
    fn drop_bits(&mut self, n: u32) {
        self.bits >>= n;
        self.bit_count -= n;
    }

    /// To the next whole byte.
    pub fn align(&mut self) {
        self.drop_bits(self.bit_count % 8);
    }

    /// Whether nothing is kept of the input that was taken.
    pub fn is_drained(&self) -> bool {
        self.bit_count == 0
    }

    pub unsafe fn run(&mut self, at: &mut Place) -> Pause {
        loop {
            let more = match self.step {
                Step::Block => self.begin_block(at),
                Step::StoredLength => self.stored_length(at),
                Step::Stored => self.stored(at),
                Step::Counts => self.counts(at),
                Step::Precode => self.read_precode(at),
                Step::Lengths => self.read_lengths(at),
                Step::Symbols => self.symbols(at),
                Step::End => Err(Pause::End),
            };
            if let Err(pause) = more {
                return pause;
            }
        }
    }

    unsafe fn begin_block(&mut self, at: &mut Place) -> Result<(), Pause> {
        let head = self.take(at, 3).ok_or(Pause::Input)?;
        self.is_last = head & 1;
        self.step = match head >> 1 {
            0 => {
                self.align();
                Step::StoredLength
            }
            1 => {
                self.fixed();
                Step::Symbols
            }
            2 => Step::Counts,
            _ => return Err(Pause::Problem(problem::BLOCK)),
        };
        Ok(())
    }

    fn end_block(&mut self) {
        self.step = if self.is_last == 1 { Step::End } else { Step::Block };
    }

    unsafe fn stored_length(&mut self, at: &mut Place) -> Result<(), Pause> {
        let both = self.take(at, 32).ok_or(Pause::Input)?;
        self.left = both & 0xffff;
        if both >> 16 != self.left ^ 0xffff {
            return Err(Pause::Problem(problem::BLOCK));
        }
        self.step = Step::Stored;
        Ok(())
    }

    unsafe fn stored(&mut self, at: &mut Place) -> Result<(), Pause> {
        while self.left > 0 {
            if at.out >= at.end {
                return Err(Pause::Output);
            }
            if self.bit_count > 0 {
                *at.out = self.bits as u8;
                at.out = at.out.add(1);
                self.drop_bits(8);
                self.left -= 1;
                continue;
            }
            let there = at.input_end.offset_from(at.input) as usize;
            if there == 0 {
                return Err(Pause::Input);
            }
            let n = there.min(self.left as usize).min(at.end.offset_from(at.out) as usize);
            copy_nonoverlapping(at.input, at.out, n);
            at.input = at.input.add(n);
            at.out = at.out.add(n);
            self.left -= n as u32;
        }
        self.end_block();
        if at.out >= at.soft {
            return Err(Pause::Output);
        }
        Ok(())
    }

    fn fixed(&mut self) {
        for (i, length) in self.lengths[..288].iter_mut().enumerate() {
            *length = match i {
                0..=143 => 8,
                144..=255 => 9,
                256..=279 => 7,
                _ => 8,
            };
        }
        self.lengths[288..].fill(5);
        build(&mut self.length_table, LENGTH_BITS, &self.lengths[..288], &LENGTH_SYMBOLS, false);
        build(&mut self.distance_table, DISTANCE_BITS, &self.lengths[288..], &DISTANCE_SYMBOLS, false);
    }

    unsafe fn counts(&mut self, at: &mut Place) -> Result<(), Pause> {
        let counts = self.take(at, 14).ok_or(Pause::Input)?;
        self.length_codes = (counts & 31) + 257;
        self.distance_codes = (counts >> 5 & 31) + 1;
        self.precode_codes = (counts >> 10) + 4;
        if self.length_codes > 286 || self.distance_codes > 30 {
            return Err(Pause::Problem(problem::CODE));
        }
        self.lengths[..19].fill(0);
        self.left = 0;
        self.step = Step::Precode;
        Ok(())
    }

    unsafe fn read_precode(&mut self, at: &mut Place) -> Result<(), Pause> {
        while self.left < self.precode_codes {
            let length = self.take(at, 3).ok_or(Pause::Input)?;
            self.lengths[PRECODE_ORDER[self.left as usize] as usize] = length as u8;
            self.left += 1;
        }
        let lengths = &self.lengths[..19];
        if !build(&mut self.precode, PRECODE_BITS, lengths, &PRECODE_SYMBOLS, false) {
            return Err(Pause::Problem(problem::CODE));
        }
        self.left = 0;
        self.step = Step::Lengths;
        Ok(())
    }

    unsafe fn read_lengths(&mut self, at: &mut Place) -> Result<(), Pause> {
        let all = self.length_codes + self.distance_codes;
        while self.left < all {
            self.fill(at);
            let entry = self.precode[(self.bits & ((1 << PRECODE_BITS) - 1)) as usize];
            let (symbol, code_bits) = (entry >> 16, entry & 63);
            let extra = match symbol {
                16 => 2,
                17 => 3,
                18 => 7,
                _ => 0,
            };
            if self.bit_count < code_bits + extra {
                return Err(Pause::Input);
            }
            let value = (self.bits >> code_bits) as u32 & ((1 << extra) - 1);
            let (length, times) = match symbol {
                16 if self.left == 0 => return Err(Pause::Problem(problem::CODE)),
                16 => (self.lengths[self.left as usize - 1], value + 3),
                17 => (0, value + 3),
                18 => (0, value + 11),
                _ => (symbol as u8, 1),
            };
            if self.left + times > all {
                return Err(Pause::Problem(problem::CODE));
            }
            self.drop_bits(code_bits + extra);
            let from = self.left as usize;
            self.lengths[from..from + times as usize].fill(length);
            self.left += times;
        }
        let (lengths, distances) = self.lengths[..all as usize].split_at(self.length_codes as usize);
        let is_code = lengths[256] != 0
            && build(&mut self.length_table, LENGTH_BITS, lengths, &LENGTH_SYMBOLS, true)
            && build(&mut self.distance_table, DISTANCE_BITS, distances, &DISTANCE_SYMBOLS, true);
        if !is_code {
            return Err(Pause::Problem(problem::CODE));
        }
        self.step = Step::Symbols;
        Ok(())
    }

    unsafe fn symbols(&mut self, at: &mut Place) -> Result<(), Pause> {
        loop {
            if self.match_length > 0 {
                self.copy_match(at)?;
            }
            let hot_end = (at.end as usize).saturating_sub(HOT_OUT).min(at.soft as usize) as *mut u8;
            let hot_input_end = (at.input_end as usize).saturating_sub(HOT_IN) as *const u8;
            if at.out < hot_end && at.input < hot_input_end {
                let ended = if is_x86_feature_detected!("bmi2") {
                    self.hot_bmi2(at, hot_input_end, hot_end)?
                } else {
                    self.hot(at, hot_input_end, hot_end)?
                };
                if ended {
                    self.end_block();
                    return Ok(());
                }
            }
            if at.out >= at.soft {
                return Err(Pause::Output);
            }
            if self.one_symbol(at)? {
                self.end_block();
                return Ok(());
            }
        }
    }

    /// Answers whether it was the end of the block.
    unsafe fn one_symbol(&mut self, at: &mut Place) -> Result<bool, Pause> {
        self.fill(at);
        let entry = self.look_up(&self.length_table, LENGTH_BITS, self.bits, self.bit_count)?;
        let used = entry & 63;
        if entry & LITERAL != 0 {
            if at.out >= at.end {
                return Err(Pause::Output);
            }
            *at.out = (entry >> 16) as u8;
            at.out = at.out.add(1);
            self.drop_bits(used);
            return Ok(false);
        }
        if entry & EXCEPTION != 0 {
            self.drop_bits(used);
            return Ok(true);
        }
        let rest = self.bits >> used;
        let distance = self.look_up(&self.distance_table, DISTANCE_BITS, rest, self.bit_count - used)?;
        self.match_length = with_extra(entry, self.bits);
        self.match_distance = with_extra(distance, rest);
        self.drop_bits(used + (distance & 63));
        if self.match_distance as usize > at.out as usize - at.floor as usize {
            return Err(Pause::Problem(problem::DISTANCE));
        }
        Ok(false)
    }

    /// The entry that the next bits mean, if so many are there that they mean one.
    #[inline(always)]
    fn look_up(&self, table: &[u32], first_bits: usize, bits: u64, bit_count: u32) -> Result<u32, Pause> {
        let mut entry = table[(bits & ((1 << first_bits) - 1)) as usize];
        if entry & EXCEPTION != 0 && entry & SECOND_LEVEL != 0 {
            if bit_count <= first_bits as u32 {
                return Err(Pause::Input);
            }
            entry = table[second_level(entry, bits, first_bits)];
        }
        if bit_count < entry & 63 {
            return Err(Pause::Input);
        }
        if entry & EXCEPTION != 0 && entry & END_OF_BLOCK == 0 {
            return Err(Pause::Problem(problem::SYMBOL));
        }
        Ok(entry)
    }

    unsafe fn copy_match(&mut self, at: &mut Place) -> Result<(), Pause> {
        let room = at.end.offset_from(at.out) as usize;
        let n = (self.match_length as usize).min(room);
        let from = at.out.sub(self.match_distance as usize);
        for i in 0..n {
            *at.out.add(i) = *from.add(i);
        }
        at.out = at.out.add(n);
        self.match_length -= n as u32;
        if self.match_length > 0 {
            return Err(Pause::Output);
        }
        Ok(())
    }
}

/// The base in an entry and the extra bits behind its code.
#[inline(always)]
pub fn with_extra(entry: u32, bits: u64) -> u32 {
    (entry >> 16) + (bits & !u64::MAX.wrapping_shl(entry)).wrapping_shr(entry >> 8) as u32
}

#[inline(always)]
pub fn second_level(entry: u32, bits: u64, first_bits: usize) -> usize {
    let second_bits = entry >> 8 & 15;
    (entry >> 16) as usize + ((bits >> first_bits) & ((1 << second_bits) - 1)) as usize
}
