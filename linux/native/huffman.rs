//! Tables for the two prefix codes of a deflate block. The low bits of the input index the first level; a code longer than that
//! leads to a second one. An entry says all that a symbol needs, so that the hot loop looks nothing else up.
//!
//! An entry, from bit 0: 0..6 bits to consume, extra bits included; 8..12 of these, the code's own; 12..16 what kind, below;
//! 16..32 the literal, the base of a length or distance, or where the second level begins.

pub const LITERAL: u32 = 1 << 15;
/// Neither a literal nor a length nor a distance.
pub const EXCEPTION: u32 = 1 << 14;
/// Of these, what is neither of the two below is invalid.
pub const SECOND_LEVEL: u32 = 1 << 13;
pub const END_OF_BLOCK: u32 = 1 << 12;

pub const MAX_CODE_BITS: usize = 15;
pub const LENGTH_BITS: usize = 11;
pub const DISTANCE_BITS: usize = 9;
/// Codes that go on past the first level share a second one by twos at least, and it has as many bits as the longest needs.
pub const LENGTH_ENTRIES: usize = (1 << LENGTH_BITS) + 288 / 2 * (1 << (MAX_CODE_BITS - LENGTH_BITS));
pub const DISTANCE_ENTRIES: usize = (1 << DISTANCE_BITS) + 32 / 2 * (1 << (MAX_CODE_BITS - DISTANCE_BITS));
pub const PRECODE_BITS: usize = 7;

/// Base value and extra bits of length symbols 257 and up.
const LENGTHS: [(u16, u8); 29] = [
    (3, 0), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0), (10, 0), (11, 1), (13, 1), (15, 1), (17, 1), (19, 2), (23, 2), (27, 2),
    (31, 2), (35, 3), (43, 3), (51, 3), (59, 3), (67, 4), (83, 4), (99, 4), (115, 4), (131, 5), (163, 5), (195, 5), (227, 5), (258, 0),
];
const DISTANCES: [(u16, u8); 30] = [
    (1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (7, 1), (9, 2), (13, 2), (17, 3), (25, 3), (33, 4), (49, 4), (65, 5), (97, 5), (129, 6),
    (193, 6), (257, 7), (385, 7), (513, 8), (769, 8), (1025, 9), (1537, 9), (2049, 10), (3073, 10), (4097, 11), (6145, 11),
    (8193, 12), (12289, 12), (16385, 13), (24577, 13),
];

/// The entry of each symbol but for the length of its code.
pub static LENGTH_SYMBOLS: [u32; 288] = length_symbols();
pub static DISTANCE_SYMBOLS: [u32; 32] = distance_symbols();
/// Of the code that code lengths are written in.
pub static PRECODE_SYMBOLS: [u32; 19] = precode_symbols();

const fn length_symbols() -> [u32; 288] {
    let mut all = [EXCEPTION; 288];
    let mut i = 0;
    while i < 286 {
        all[i] = match i {
            0..=255 => LITERAL | (i as u32) << 16,
            256 => EXCEPTION | END_OF_BLOCK,
            _ => with_extra(LENGTHS[i - 257]),
        };
        i += 1;
    }
    all
}

const fn distance_symbols() -> [u32; 32] {
    let mut all = [EXCEPTION; 32];
    let mut i = 0;
    while i < 30 {
        all[i] = with_extra(DISTANCES[i]);
        i += 1;
    }
    all
}

const fn precode_symbols() -> [u32; 19] {
    let mut all = [0; 19];
    let mut i = 0;
    while i < 19 {
        all[i] = (i as u32) << 16;
        i += 1;
    }
    all
}

const fn with_extra((base, extra): (u16, u8)) -> u32 {
    (base as u32) << 16 | extra as u32
}

/// Fills `table` for a code whose symbols have these lengths (0: not in it). False if there is no such code: too many short ones,
/// or too few; a single code of one bit is taken, and none at all, if `may_be_small`.
///
/// Codes count up in the order of their length, and the input has them with their first bit lowest. So the table for codes of up to n
/// bits is that for n - 1 twice, and the codes of n bits in it: each entry is written once, and copied as one of many.
pub fn build(table: &mut [u32], first_bits: usize, lengths: &[u8], symbols: &[u32], may_be_small: bool) -> bool {
    let mut count = [0u32; MAX_CODE_BITS + 1];
    for &length in lengths {
        count[length as usize & 15] += 1;
    }
    count[0] = 0;
    let longest = (1..=MAX_CODE_BITS).rev().find(|&l| count[l] > 0).unwrap_or(0);
    let mut left = 1i32;
    for &n in &count[1..] {
        left = 2 * left - n as i32;
        if left < 0 {
            return false;
        }
    }
    let first = 1 << first_bits;
    if left > 0 {
        if !may_be_small || longest > 1 {
            return false;
        }
        table[..first].fill(EXCEPTION | 1);
        if let Some(only) = lengths.iter().position(|&l| l > 0) {
            table[..first].iter_mut().step_by(2).for_each(|entry| *entry = entry_of(symbols[only], 1));
        }
        return true;
    }
    let mut offsets = [0u32; MAX_CODE_BITS + 2];
    for l in 1..=MAX_CODE_BITS {
        offsets[l + 1] = offsets[l] + count[l];
    }
    let mut sorted = [0u16; 288];
    for (i, &l) in lengths.iter().enumerate() {
        if l > 0 {
            let at = &mut offsets[l as usize & 15];
            sorted[*at as usize] = i as u16;
            *at += 1;
        }
    }
    let mut rest = &sorted[..count.iter().sum::<u32>() as usize];
    // The next code, its first bit lowest.
    let mut code = 0;
    for length in 1..=first_bits {
        let size = 1 << length;
        let (below, above) = table.split_at_mut(size / 2);
        if length > 1 {
            above[..size / 2].copy_from_slice(below);
        }
        let (these, others) = rest.split_at(count[length] as usize);
        rest = others;
        for &i in these {
            table[code] = entry_of(symbols[i as usize], length);
            code = after(code, size);
        }
    }
    if rest.is_empty() {
        return true;
    }
    let second_bits = longest - first_bits;
    let mut second = first;
    let mut open = usize::MAX;
    for &i in rest {
        let length = lengths[i as usize] as usize;
        let prefix = code & (first - 1);
        if prefix != open {
            if open != usize::MAX {
                second += 1 << second_bits;
            }
            open = prefix;
            table[prefix] = EXCEPTION | SECOND_LEVEL | (second as u32) << 16 | (second_bits as u32) << 8 | first_bits as u32;
        }
        let entry = entry_of(symbols[i as usize], length);
        let mut at = code >> first_bits;
        while at < 1 << second_bits {
            table[second + at] = entry;
            at += 1 << (length - first_bits);
        }
        code = after(code, 1 << length);
    }
    true
}

fn entry_of(symbol: u32, length: usize) -> u32 {
    symbol + length as u32 * (1 << 8 | 1)
}

/// The code behind `code`, of the same length: one more, counted from the highest of its bits. Of a longer length it is the same number.
fn after(code: usize, size: usize) -> usize {
    let clear = !code & (size - 1);
    if clear == 0 {
        return 0;
    }
    let bit = 1 << (usize::BITS - 1 - clear.leading_zeros());
    code & (bit - 1) | bit
}
