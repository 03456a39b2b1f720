//! The part of inflating that takes the time: codes of a block, far from both ends of what is at hand. Eight bytes are read at a time, and
//! matches are copied in pieces that may write past them; `deflate.rs` calls it and does what is near the ends.

use crate::deflate::*;
use crate::huffman::*;
use std::arch::x86_64::*;
use std::ptr::copy;

impl Inflater {
    #[target_feature(enable = "bmi1,bmi2")]
    pub unsafe fn hot_bmi2(&mut self, at: &mut Place, input_end: *const u8, out_end: *mut u8) -> Result<bool, Pause> {
        self.hot(at, input_end, out_end)
    }

    /// Until `input_end` or `out_end` is passed. Answers whether the block has ended.
    #[inline(always)]
    pub unsafe fn hot(&mut self, at: &mut Place, input_end: *const u8, out_end: *mut u8) -> Result<bool, Pause> {
        const LENGTH_MASK: u64 = (1 << LENGTH_BITS) - 1;
        const DISTANCE_MASK: u64 = (1 << DISTANCE_BITS) - 1;
        let length_table = self.length_table.as_ptr();
        let distance_table = self.distance_table.as_ptr();
        // Of `count` only the lowest byte counts: an entry is subtracted whole.
        let (mut bits, mut count) = (self.bits, self.bit_count);
        let (mut input, mut out) = (at.input, at.out);
        let floor = at.floor as usize;
        let mut outcome = Ok(false);
        // Reads past `count`: the bits above it are those of bytes that `input` still stands before, and are read again.
        macro_rules! refill {
            () => {
                bits |= (input as *const u64).read_unaligned().wrapping_shl(count);
                input = input.add((7 - (count >> 3 & 7)) as usize);
                count |= 56;
            };
        }
        macro_rules! consume {
            ($entry:expr) => {
                bits = bits.wrapping_shr($entry);
                count = count.wrapping_sub($entry);
            };
        }
        macro_rules! next_length {
            () => {
                *length_table.add((bits & LENGTH_MASK) as usize)
            };
        }
        macro_rules! literals {
            ($entry:expr) => {
                consume!($entry);
                *out = ($entry >> 16) as u8;
                out = out.add(1);
            };
        }
        refill!();
        let mut entry = next_length!();
        loop {
            // 56 bits or more: enough for three entries of the first level, or for two and a length before the next refill.
            if entry & LITERAL != 0 {
                literals!(entry);
                entry = next_length!();
                if entry & LITERAL != 0 {
                    literals!(entry);
                    entry = next_length!();
                    if entry & LITERAL != 0 {
                        literals!(entry);
                        if input >= input_end || out >= out_end {
                            break;
                        }
                        refill!();
                        entry = next_length!();
                        continue;
                    }
                }
            }
            if entry & EXCEPTION != 0 {
                if entry & SECOND_LEVEL != 0 {
                    entry = *length_table.add(second_level(entry, bits, LENGTH_BITS));
                    if entry & LITERAL != 0 {
                        literals!(entry);
                        if input >= input_end || out >= out_end {
                            break;
                        }
                        refill!();
                        entry = next_length!();
                        continue;
                    }
                }
                if entry & EXCEPTION != 0 {
                    outcome = if entry & END_OF_BLOCK != 0 { Ok(true) } else { Err(Pause::Problem(problem::SYMBOL)) };
                    consume!(entry);
                    break;
                }
            }
            let length = with_extra(entry, bits) as usize;
            consume!(entry);
            let mut far = *distance_table.add((bits & DISTANCE_MASK) as usize);
            refill!();
            if far & EXCEPTION != 0 {
                if far & SECOND_LEVEL != 0 {
                    far = *distance_table.add(second_level(far, bits, DISTANCE_BITS));
                }
                if far & EXCEPTION != 0 {
                    outcome = Err(Pause::Problem(problem::SYMBOL));
                    break;
                }
            }
            let distance = with_extra(far, bits) as usize;
            consume!(far);
            if distance > out as usize - floor {
                outcome = Err(Pause::Problem(problem::DISTANCE));
                break;
            }
            refill!();
            entry = next_length!();
            copy_hot(out, distance, length);
            out = out.add(length);
            if input >= input_end || out >= out_end {
                break;
            }
        }
        self.bit_count = count & 63;
        self.bits = bits & ((1u64 << self.bit_count) - 1);
        at.input = input;
        at.out = out;
        outcome
    }
}

/// Copies a match, and up to 47 bytes more than it has.
#[inline(always)]
unsafe fn copy_hot(out: *mut u8, distance: usize, length: usize) {
    let from = out.sub(distance) as *const u8;
    let end = out.add(length);
    if distance >= 16 {
        let piece = |n: usize| _mm_storeu_si128(out.add(n) as *mut __m128i, _mm_loadu_si128(from.add(n) as *const __m128i));
        piece(0);
        piece(16);
        let mut n = 32;
        while n < length {
            piece(n);
            piece(n + 16);
            n += 32;
        }
    } else if distance == 1 {
        let byte = _mm_set1_epi8(*from as i8);
        let mut to = out;
        loop {
            _mm_storeu_si128(to as *mut __m128i, byte);
            to = to.add(16);
            if to >= end {
                break;
            }
        }
    } else {
        // The pattern repeats: each piece of eight is right as far as the distance, and the next one begins there.
        let step = distance.min(8);
        let (mut source, mut to) = (from, out);
        loop {
            copy(source, to, 8);
            source = source.add(step);
            to = to.add(step);
            if to >= end {
                break;
            }
        }
    }
}
