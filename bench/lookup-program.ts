/**
 * The peer of index-lookup.bench.ts in C++: the same lookups in the index of containerd/overlaybd, plain (binary search) and merged (B+ tree),
 * linked against what its build has made. $OVERLAYBD_SOURCE names its folder, with the build in `build/`.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { fail } from './errors.ts';

const LOOKUP_CPP = `
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <sys/resource.h>
#include "overlaybd/lsmt/index.h"
using namespace LSMT;
static double cpu() {
  rusage r; getrusage(RUSAGE_SELF, &r);
  return (r.ru_utime.tv_sec + r.ru_stime.tv_sec) * 1e3 + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e3;
}
template <class T> static std::vector<T> load(const char *path) {
  FILE *file = fopen(path, "rb"); if (!file) exit(2);
  fseek(file, 0, SEEK_END); std::vector<T> all(ftell(file) / sizeof(T)); rewind(file);
  if (fread(all.data(), sizeof(T), all.size(), file) != all.size()) exit(3);
  fclose(file); return all;
}
int main(int, char **argv) { /* lookup SEGMENTS POSITIONS: milliseconds of processor time and a sum, plain and merged */
  auto segments = load<SegmentMapping>(argv[1]); auto positions = load<double>(argv[2]);
  IMemoryIndex *plain = create_memory_index(segments.data(), segments.size(), 0, UINT64_MAX, false, 0);
  const IMemoryIndex *one[1] = { plain };
  IMemoryIndex *both[2] = { plain, merge_memory_indexes(one, 1) };
  for (auto index : both) {
    double ms = 0; uint64_t sum = 0; SegmentMapping found[16];
    for (int run = 0; run < 2; run++) { /* the first is to warm up */
      double before = cpu(); sum = 0;
      for (double at : positions) if (index->lookup(Segment{(uint64_t)at, 8}, found, 16)) sum += found[0].moffset;
      ms = cpu() - before;
    }
    fprintf(stderr, "\\n= %.3f %lu\\n", ms, sum);
  }
}
`;

export interface CppLookups {
  readonly plainMs: number;
  readonly mergedMs: number;
  /** Of where the bytes are: both sides must have found the same. */
  readonly sum: number;
}

/** Undefined where there is nothing to build it with. */
export function buildCppLookup(scratch: string): ((segments: string, positions: string) => CppLookups) | undefined {
  const folder = process.env.OVERLAYBD_SOURCE;
  if (!folder) return undefined;
  const libraries = ['output/liblsmt_lib.a', '_deps/photon-build/output/libphoton_sole.a'].map((name) =>
    join(folder, 'build', name),
  );
  const missing = [join(folder, 'src/overlaybd/lsmt/index.h'), ...libraries].find((path) => !existsSync(path));
  if (missing !== undefined) throw commandFailed('$OVERLAYBD_SOURCE', 'nothing', `there is no ${missing}`);
  const source = join(scratch, 'lookup.cpp');
  const program = join(scratch, 'lookup');
  writeFileSync(source, LOOKUP_CPP);
  const flags = ['-std=c++17', '-O2', '-DNDEBUG', `-I${join(folder, 'src')}`, source, ...libraries, '-o', program];
  const systemLibraries = ['pthread', 'dl', 'ssl', 'crypto', 'curl', 'aio', 'z', 'rt'].map((name) => `-l${name}`);
  const compiled = spawnSync('g++', [...flags, ...systemLibraries], { encoding: 'utf8' });
  if (compiled.status !== 0) {
    throw commandFailed('g++', compiled.status, compiled.error?.message ?? compiled.stderr.slice(-400));
  }
  return (segments, positions) => {
    const { stderr, status } = spawnSync(program, [segments, positions], { encoding: 'utf8', maxBuffer: 2 ** 26 });
    const [plain, merged] = [...stderr.matchAll(/^= ([\d.]+) (\d+)$/gm)];
    if (status !== 0 || plain === undefined || merged === undefined || plain[2] !== merged[2]) {
      throw commandFailed(program, status, stderr.slice(-400));
    }
    return { plainMs: Number(plain[1]), mergedMs: Number(merged[1]), sum: Number(plain[2]) };
  };
}

function commandFailed(command: string, status: unknown, output: string): Error {
  return fail('BENCH_COMMAND', { command, status: String(status), output });
}
