//! CRC-32 of gzip: by carry-less multiplication where the processor has it, else eight bytes a step by tables.

use std::arch::x86_64::*;

const POLYNOMIAL: u32 = 0xedb8_8320;

const fn tables() -> [[u32; 256]; 8] {
    let mut t = [[0u32; 256]; 8];
    let mut i = 0;
    while i < 256 {
        let mut c = i as u32;
        let mut bit = 0;
        while bit < 8 {
            c = if c & 1 != 0 { c >> 1 ^ POLYNOMIAL } else { c >> 1 };
            bit += 1;
        }
        t[0][i] = c;
        i += 1;
    }
    let mut n = 1;
    while n < 8 {
        let mut i = 0;
        while i < 256 {
            t[n][i] = t[n - 1][i] >> 8 ^ t[0][(t[n - 1][i] & 0xff) as usize];
            i += 1;
        }
        n += 1;
    }
    t
}

static TABLES: [[u32; 256]; 8] = tables();

/// Of the bytes behind those that gave `crc`; 0 for the first.
pub fn update(crc: u32, bytes: &[u8]) -> u32 {
    let mut state = !crc;
    let mut rest = bytes;
    if rest.len() >= 64 && is_x86_feature_detected!("pclmulqdq") && is_x86_feature_detected!("sse4.1") {
        let whole = rest.len() & !15;
        state = unsafe { folded(state, &rest[..whole]) };
        rest = &rest[whole..];
    }
    !by_tables(state, rest)
}

fn by_tables(mut state: u32, bytes: &[u8]) -> u32 {
    let mut eights = bytes.chunks_exact(8);
    for b in &mut eights {
        let low = state ^ u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        state = TABLES[7][(low & 0xff) as usize]
            ^ TABLES[6][(low >> 8 & 0xff) as usize]
            ^ TABLES[5][(low >> 16 & 0xff) as usize]
            ^ TABLES[4][(low >> 24) as usize]
            ^ TABLES[3][b[4] as usize]
            ^ TABLES[2][b[5] as usize]
            ^ TABLES[1][b[6] as usize]
            ^ TABLES[0][b[7] as usize];
    }
    for &b in eights.remainder() {
        state = state >> 8 ^ TABLES[0][((state ^ b as u32) & 0xff) as usize];
    }
    state
}

/// Powers of x modulo the polynomial, bits in gzip's order: x^(n+32) and x^(n-32) for a distance of n bits.
const FOLD_512: (i64, i64) = (0x1_5444_2bd4, 0x1_c6e4_1596);
const FOLD_128: (i64, i64) = (0x1_7519_97d0, 0x0_ccaa_009e);
const FOLD_64: i64 = 0x1_63cd_6124;
/// The polynomial and x^64 divided by it, for the last step (Barrett).
const REDUCE: (i64, i64) = (0x1_db71_0641, 0x1_f701_1641);

#[inline(always)]
unsafe fn fold(x: __m128i, k: __m128i, next: __m128i) -> __m128i {
    let (low, high) = (_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11));
    _mm_xor_si128(_mm_xor_si128(low, high), next)
}

/// At least 64 bytes, a multiple of 16.
#[target_feature(enable = "pclmulqdq,sse4.1")]
unsafe fn folded(state: u32, bytes: &[u8]) -> u32 {
    let mut p = bytes.as_ptr() as *const __m128i;
    let end = p.add(bytes.len() / 16);
    let mut x = [_mm_loadu_si128(p), _mm_loadu_si128(p.add(1)), _mm_loadu_si128(p.add(2)), _mm_loadu_si128(p.add(3))];
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128(state as i32));
    p = p.add(4);
    let k = _mm_set_epi64x(FOLD_512.1, FOLD_512.0);
    while end.offset_from(p) >= 4 {
        for (i, lane) in x.iter_mut().enumerate() {
            *lane = fold(*lane, k, _mm_loadu_si128(p.add(i)));
        }
        p = p.add(4);
    }
    let k = _mm_set_epi64x(FOLD_128.1, FOLD_128.0);
    let mut a = fold(x[0], k, x[1]);
    a = fold(a, k, x[2]);
    a = fold(a, k, x[3]);
    while p < end {
        a = fold(a, k, _mm_loadu_si128(p));
        p = p.add(1);
    }
    let low32 = _mm_set_epi32(0, 0, 0, -1);
    a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, k, 0x10));
    let k = _mm_set_epi64x(0, FOLD_64);
    a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low32), k, 0x00));
    let k = _mm_set_epi64x(REDUCE.1, REDUCE.0);
    let mut b = _mm_clmulepi64_si128(_mm_and_si128(a, low32), k, 0x10);
    b = _mm_clmulepi64_si128(_mm_and_si128(b, low32), k, 0x00);
    _mm_extract_epi32(_mm_xor_si128(a, b), 1) as u32
}
