//! SHA-256 with the processor's SHA extensions, several digests in one pass. One digest alone leaves the unit half idle: each
//! round waits for the one before. Here two or three run in step, and two digests over the same bytes (a blob and its
//! chunks) share the message schedule, so that the second one costs next to nothing.
//!
//! Nothing is allocated: states are memory of the caller.
//! The caller asks `dsec_sha256_usable` first; all else may be called only if that answered 1.
#![allow(clippy::missing_safety_doc)]

use std::arch::x86_64::*;
use std::ptr::copy_nonoverlapping;
use std::slice::from_raw_parts_mut;

/// Of the functions and the two layouts below.
const ABI: u32 = 2;
const BLOCK: usize = 64;

const H0: [u32; 8] = [
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
];

#[repr(align(16))]
struct Constants([u32; 64]);
static K: Constants = Constants([
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
]);

#[derive(Clone, Copy)]
struct State {
    abef: __m128i,
    cdgh: __m128i,
}

#[inline(always)]
unsafe fn load(h: &[u32; 8]) -> State {
    let abcd = _mm_shuffle_epi32(_mm_loadu_si128(h.as_ptr() as *const __m128i), 0xb1);
    let efgh = _mm_shuffle_epi32(_mm_loadu_si128(h.as_ptr().add(4) as *const __m128i), 0x1b);
    State { abef: _mm_alignr_epi8(abcd, efgh, 8), cdgh: _mm_blend_epi16(efgh, abcd, 0xf0) }
}

#[inline(always)]
unsafe fn store(s: State, h: &mut [u32; 8]) {
    let feba = _mm_shuffle_epi32(s.abef, 0x1b);
    let dchg = _mm_shuffle_epi32(s.cdgh, 0xb1);
    _mm_storeu_si128(h.as_mut_ptr() as *mut __m128i, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128(h.as_mut_ptr().add(4) as *mut __m128i, _mm_alignr_epi8(dchg, feba, 8));
}

#[inline(always)]
unsafe fn constant(i: usize) -> __m128i {
    _mm_load_si128(K.0.as_ptr().add(4 * i) as *const __m128i)
}

/// Four rounds of one digest.
#[inline(always)]
unsafe fn four(s: &mut State, wk: __m128i) {
    s.cdgh = _mm_sha256rnds2_epu32(s.cdgh, s.abef, wk);
    s.abef = _mm_sha256rnds2_epu32(s.abef, s.cdgh, _mm_shuffle_epi32(wk, 0x0e));
}

/// The sixteen words of a block, and each step's successor of the oldest four.
#[inline(always)]
unsafe fn words(p: *const u8) -> [__m128i; 4] {
    let swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    let at = |i: usize| _mm_shuffle_epi8(_mm_loadu_si128(p.add(16 * i) as *const __m128i), swap);
    [at(0), at(1), at(2), at(3)]
}

#[inline(always)]
unsafe fn next(w0: __m128i, w1: __m128i, w2: __m128i, w3: __m128i) -> __m128i {
    _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w0, w1), _mm_alignr_epi8(w3, w2, 4)), w3)
}

macro_rules! sixteen_steps {
    ($step:ident) => {
        $step!(0, 0, 1, 2, 3); $step!(1, 1, 2, 3, 0); $step!(2, 2, 3, 0, 1); $step!(3, 3, 0, 1, 2);
        $step!(4, 0, 1, 2, 3); $step!(5, 1, 2, 3, 0); $step!(6, 2, 3, 0, 1); $step!(7, 3, 0, 1, 2);
        $step!(8, 0, 1, 2, 3); $step!(9, 1, 2, 3, 0); $step!(10, 2, 3, 0, 1); $step!(11, 3, 0, 1, 2);
        $step!(12, 0, 1, 2, 3); $step!(13, 1, 2, 3, 0); $step!(14, 2, 3, 0, 1); $step!(15, 3, 0, 1, 2);
    };
}

#[target_feature(enable = "sha,ssse3,sse4.1")]
unsafe fn one(a: &mut [u32; 8], pa: *const u8, blocks: usize) {
    let mut sa = load(a);
    for n in 0..blocks {
        let ba = sa;
        let mut wa = words(pa.add(64 * n));
        macro_rules! step {
            ($i:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
                four(&mut sa, _mm_add_epi32(wa[$a], constant($i)));
                if $i < 12 { wa[$a] = next(wa[$a], wa[$b], wa[$c], wa[$d]); }
            };
        }
        sixteen_steps!(step);
        sa = State { abef: _mm_add_epi32(sa.abef, ba.abef), cdgh: _mm_add_epi32(sa.cdgh, ba.cdgh) };
    }
    store(sa, a);
}

/// Two digests over the same bytes.
#[target_feature(enable = "sha,ssse3,sse4.1")]
unsafe fn twin(a: &mut [u32; 8], b: &mut [u32; 8], p: *const u8, blocks: usize) {
    let mut sa = load(a);
    let mut sb = load(b);
    for n in 0..blocks {
        let (ba, bb) = (sa, sb);
        let mut w = words(p.add(64 * n));
        macro_rules! step {
            ($i:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
                let wk = _mm_add_epi32(w[$a], constant($i));
                four(&mut sa, wk);
                four(&mut sb, wk);
                if $i < 12 { w[$a] = next(w[$a], w[$b], w[$c], w[$d]); }
            };
        }
        sixteen_steps!(step);
        sa = State { abef: _mm_add_epi32(sa.abef, ba.abef), cdgh: _mm_add_epi32(sa.cdgh, ba.cdgh) };
        sb = State { abef: _mm_add_epi32(sb.abef, bb.abef), cdgh: _mm_add_epi32(sb.cdgh, bb.cdgh) };
    }
    store(sa, a);
    store(sb, b);
}

/// Two digests over different bytes.
#[target_feature(enable = "sha,ssse3,sse4.1")]
unsafe fn pair(a: &mut [u32; 8], pa: *const u8, b: &mut [u32; 8], pb: *const u8, blocks: usize) {
    let mut sa = load(a);
    let mut sb = load(b);
    for n in 0..blocks {
        let (ba, bb) = (sa, sb);
        let mut wa = words(pa.add(64 * n));
        let mut wb = words(pb.add(64 * n));
        macro_rules! step {
            ($i:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
                four(&mut sa, _mm_add_epi32(wa[$a], constant($i)));
                four(&mut sb, _mm_add_epi32(wb[$a], constant($i)));
                if $i < 12 {
                    wa[$a] = next(wa[$a], wa[$b], wa[$c], wa[$d]);
                    wb[$a] = next(wb[$a], wb[$b], wb[$c], wb[$d]);
                }
            };
        }
        sixteen_steps!(step);
        sa = State { abef: _mm_add_epi32(sa.abef, ba.abef), cdgh: _mm_add_epi32(sa.cdgh, ba.cdgh) };
        sb = State { abef: _mm_add_epi32(sb.abef, bb.abef), cdgh: _mm_add_epi32(sb.cdgh, bb.cdgh) };
    }
    store(sa, a);
    store(sb, b);
}

/// One digest over some bytes, two over others.
#[target_feature(enable = "sha,ssse3,sse4.1")]
unsafe fn trio(a: &mut [u32; 8], pa: *const u8, b: &mut [u32; 8], c: &mut [u32; 8], pb: *const u8, blocks: usize) {
    let mut sa = load(a);
    let mut sb = load(b);
    let mut sc = load(c);
    for n in 0..blocks {
        let (ba, bb, bc) = (sa, sb, sc);
        let mut wa = words(pa.add(64 * n));
        let mut wb = words(pb.add(64 * n));
        macro_rules! step {
            ($i:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
                four(&mut sa, _mm_add_epi32(wa[$a], constant($i)));
                let wk = _mm_add_epi32(wb[$a], constant($i));
                four(&mut sb, wk);
                four(&mut sc, wk);
                if $i < 12 {
                    wa[$a] = next(wa[$a], wa[$b], wa[$c], wa[$d]);
                    wb[$a] = next(wb[$a], wb[$b], wb[$c], wb[$d]);
                }
            };
        }
        sixteen_steps!(step);
        sa = State { abef: _mm_add_epi32(sa.abef, ba.abef), cdgh: _mm_add_epi32(sa.cdgh, ba.cdgh) };
        sb = State { abef: _mm_add_epi32(sb.abef, bb.abef), cdgh: _mm_add_epi32(sb.cdgh, bb.cdgh) };
        sc = State { abef: _mm_add_epi32(sc.abef, bc.abef), cdgh: _mm_add_epi32(sc.cdgh, bc.cdgh) };
    }
    store(sa, a);
    store(sb, b);
    store(sc, c);
}

/// Two digests over bytes of their own, two over the same.
#[target_feature(enable = "sha,ssse3,sse4.1")]
unsafe fn quad(a: &mut [u32; 8], pa: *const u8, d: &mut [u32; 8], pd: *const u8, b: &mut [u32; 8], c: &mut [u32; 8], pb: *const u8, blocks: usize) {
    let mut sa = load(a);
    let mut sb = load(b);
    let mut sc = load(c);
    let mut sd = load(d);
    for n in 0..blocks {
        let (ba, bb, bc, bd) = (sa, sb, sc, sd);
        let mut wa = words(pa.add(64 * n));
        let mut wb = words(pb.add(64 * n));
        let mut wd = words(pd.add(64 * n));
        macro_rules! step {
            ($i:expr, $a:expr, $b:expr, $c:expr, $d:expr) => {
                four(&mut sa, _mm_add_epi32(wa[$a], constant($i)));
                four(&mut sd, _mm_add_epi32(wd[$a], constant($i)));
                let wk = _mm_add_epi32(wb[$a], constant($i));
                four(&mut sb, wk);
                four(&mut sc, wk);
                if $i < 12 {
                    wa[$a] = next(wa[$a], wa[$b], wa[$c], wa[$d]);
                    wb[$a] = next(wb[$a], wb[$b], wb[$c], wb[$d]);
                    wd[$a] = next(wd[$a], wd[$b], wd[$c], wd[$d]);
                }
            };
        }
        sixteen_steps!(step);
        sa = State { abef: _mm_add_epi32(sa.abef, ba.abef), cdgh: _mm_add_epi32(sa.cdgh, ba.cdgh) };
        sb = State { abef: _mm_add_epi32(sb.abef, bb.abef), cdgh: _mm_add_epi32(sb.cdgh, bb.cdgh) };
        sc = State { abef: _mm_add_epi32(sc.abef, bc.abef), cdgh: _mm_add_epi32(sc.cdgh, bc.cdgh) };
        sd = State { abef: _mm_add_epi32(sd.abef, bd.abef), cdgh: _mm_add_epi32(sd.cdgh, bd.cdgh) };
    }
    store(sa, a);
    store(sb, b);
    store(sc, c);
    store(sd, d);
}

/// One digest over a stream.
#[repr(C)]
pub struct Digest {
    h: [u32; 8],
    /// Bytes so far.
    total: u64,
    /// The last `total % 64` of them.
    rest: [u8; BLOCK],
}

/// The digest of a whole and the digest of each of its chunks.
#[repr(C)]
pub struct Blob {
    whole: Digest,
    chunk: [u32; 8],
    /// A multiple of 64.
    chunk_bytes: u64,
}

impl Digest {
    fn fill(&self) -> usize {
        (self.total % BLOCK as u64) as usize
    }

    /// Takes bytes into `rest` until it is a block, if there is something in it. Answers how many, and whether it is one now.
    unsafe fn top_up(&mut self, p: *const u8, n: usize) -> (usize, bool) {
        let fill = self.fill();
        if fill == 0 {
            return (0, false);
        }
        let take = n.min(BLOCK - fill);
        copy_nonoverlapping(p, self.rest.as_mut_ptr().add(fill), take);
        self.total += take as u64;
        (take, fill + take == BLOCK)
    }

    unsafe fn keep(&mut self, p: *const u8, n: usize) {
        copy_nonoverlapping(p, self.rest.as_mut_ptr(), n);
        self.total += n as u64;
    }

    unsafe fn update(&mut self, p: *const u8, n: usize) {
        let (mut at, full) = self.top_up(p, n);
        if full {
            one(&mut self.h, self.rest.as_ptr(), 1);
        }
        let blocks = (n - at) / BLOCK;
        one(&mut self.h, p.add(at), blocks);
        self.total += (blocks * BLOCK) as u64;
        at += blocks * BLOCK;
        if at < n {
            self.keep(p.add(at), n - at);
        }
    }
}

impl Blob {
    /// Blocks until the chunk ends.
    fn room(&self) -> usize {
        ((self.chunk_bytes - self.whole.total / BLOCK as u64 * BLOCK as u64 % self.chunk_bytes) / BLOCK as u64) as usize
    }

    /// Writes the chunk's digest out if it has ended with what was taken last.
    unsafe fn end_chunk(&mut self, out: &mut *mut u8) {
        if self.whole.total % self.chunk_bytes == 0 {
            finish(self.chunk, &[], self.chunk_bytes, *out);
            *out = out.add(32);
            self.chunk = H0;
        }
    }
}

unsafe fn put(h: &[u32; 8], out: *mut u8) {
    for (bytes, word) in from_raw_parts_mut(out, 32).chunks_exact_mut(4).zip(h) {
        bytes.copy_from_slice(&word.to_be_bytes());
    }
}

/// The digest of what `h` has seen so far: `total` bytes, `rest` the last of them that are no whole block.
unsafe fn finish(mut h: [u32; 8], rest: &[u8], total: u64, out: *mut u8) {
    let mut end = [0u8; 2 * BLOCK];
    end[..rest.len()].copy_from_slice(rest);
    end[rest.len()] = 0x80;
    let blocks = if rest.len() < BLOCK - 8 { 1 } else { 2 };
    end[blocks * BLOCK - 8..blocks * BLOCK].copy_from_slice(&(total * 8).to_be_bytes());
    one(&mut h, end.as_ptr(), blocks);
    put(&h, out);
}

/// 1 if this processor has what the code below needs and `abi` is the one that the caller knows.
#[no_mangle]
pub extern "C" fn dsec_sha256_usable(abi: u32) -> i32 {
    let able = is_x86_feature_detected!("sha") && is_x86_feature_detected!("ssse3") && is_x86_feature_detected!("sse4.1");
    (abi == ABI && able) as i32
}

#[no_mangle]
pub unsafe extern "C" fn dsec_sha256_begin(d: *mut Digest) {
    *d = Digest { h: H0, total: 0, rest: [0; BLOCK] };
}

#[no_mangle]
pub unsafe extern "C" fn dsec_sha256_update(d: *mut Digest, p: *const u8, n: u64) {
    (*d).update(p, n as usize);
}

/// Leaves the state as it is.
#[no_mangle]
pub unsafe extern "C" fn dsec_sha256_end(d: *const Digest, out: *mut u8) {
    let d = &*d;
    finish(d.h, &d.rest[..d.fill()], d.total, out);
}

/// Two streams, each with bytes of its own.
#[no_mangle]
pub unsafe extern "C" fn dsec_sha256_update_pair(a: *mut Digest, p: *const u8, n: u64, b: *mut Digest, q: *const u8, m: u64) {
    let (a, b) = (&mut *a, &mut *b);
    let (mut p, mut n, mut q, mut m) = (p, n as usize, q, m as usize);
    to_block(a, &mut p, &mut n);
    to_block(b, &mut q, &mut m);
    let blocks = n.min(m) / BLOCK;
    pair(&mut a.h, p, &mut b.h, q, blocks);
    let bytes = blocks * BLOCK;
    a.total += bytes as u64;
    b.total += bytes as u64;
    a.update(p.add(bytes), n - bytes);
    b.update(q.add(bytes), m - bytes);
}

/// Takes bytes until the stream is at the beginning of a block, or there are none left.
unsafe fn to_block(d: &mut Digest, p: &mut *const u8, n: &mut usize) {
    let take = (*n).min((BLOCK - d.fill()) % BLOCK);
    d.update(*p, take);
    *p = p.add(take);
    *n -= take;
}

#[no_mangle]
pub unsafe extern "C" fn dsec_blob_begin(b: *mut Blob, chunk_bytes: u64) {
    *b = Blob { whole: Digest { h: H0, total: 0, rest: [0; BLOCK] }, chunk: H0, chunk_bytes };
}

/// Bytes of a stream that are to be hashed.
struct Due {
    stream: *mut Digest,
    p: *const u8,
    n: usize,
}

impl Due {
    unsafe fn begin(&mut self) {
        if self.n > 0 {
            to_block(&mut *self.stream, &mut self.p, &mut self.n);
        }
    }

    fn blocks(&self) -> usize {
        self.n / BLOCK
    }

    unsafe fn advance(&mut self, blocks: usize) {
        (*self.stream).total += (blocks * BLOCK) as u64;
        self.p = self.p.add(blocks * BLOCK);
        self.n -= blocks * BLOCK;
    }
}

/// Bytes of a blob, and beside them bytes of two other streams (0 of one that there is not). The digests of chunks that end go to
/// `out`, which has room for them. Answers how many.
#[no_mangle]
pub unsafe extern "C" fn dsec_blob_update(
    b: *mut Blob, p: *const u8, n: u64, out: *mut u8, d: *mut Digest, q: *const u8, m: u64, e: *mut Digest, r: *const u8, l: u64,
) -> u32 {
    let b = &mut *b;
    let (mut p, mut n, mut at) = (p, n as usize, out);
    let (mut x, mut y) = (Due { stream: d, p: q, n: m as usize }, Due { stream: e, p: r, n: l as usize });
    let (take, full) = b.whole.top_up(p, n);
    if full {
        twin(&mut b.whole.h, &mut b.chunk, b.whole.rest.as_ptr(), 1);
        b.end_chunk(&mut at);
    }
    p = p.add(take);
    n -= take;
    x.begin();
    y.begin();
    while n >= BLOCK {
        let mut blocks = b.room().min(n / BLOCK);
        let (whole, chunk) = (&mut b.whole.h, &mut b.chunk);
        if x.blocks() == 0 {
            std::mem::swap(&mut x, &mut y);
        }
        if x.blocks() > 0 && y.blocks() > 0 {
            blocks = blocks.min(x.blocks()).min(y.blocks());
            quad(&mut (*x.stream).h, x.p, &mut (*y.stream).h, y.p, whole, chunk, p, blocks);
            x.advance(blocks);
            y.advance(blocks);
        } else if x.blocks() > 0 {
            blocks = blocks.min(x.blocks());
            trio(&mut (*x.stream).h, x.p, whole, chunk, p, blocks);
            x.advance(blocks);
        } else {
            twin(whole, chunk, p, blocks);
        }
        b.whole.total += (blocks * BLOCK) as u64;
        p = p.add(blocks * BLOCK);
        n -= blocks * BLOCK;
        b.end_chunk(&mut at);
    }
    if n > 0 {
        b.whole.keep(p, n);
    }
    if x.n > 0 && y.n > 0 {
        dsec_sha256_update_pair(x.stream, x.p, x.n as u64, y.stream, y.p, y.n as u64);
    } else if x.n > 0 {
        (*x.stream).update(x.p, x.n);
    } else if y.n > 0 {
        (*y.stream).update(y.p, y.n);
    }
    ((at as usize - out as usize) / 32) as u32
}

/// The whole's digest, then that of the last chunk if it is a shorter one: answers how many of those, 0 or 1.
#[no_mangle]
pub unsafe extern "C" fn dsec_blob_end(b: *const Blob, out: *mut u8) -> u32 {
    let b = &*b;
    let rest = &b.whole.rest[..b.whole.fill()];
    finish(b.whole.h, rest, b.whole.total, out);
    let in_chunk = b.whole.total % b.chunk_bytes;
    if in_chunk == 0 {
        return 0;
    }
    finish(b.chunk, rest, in_chunk, out.add(32));
    1
}
