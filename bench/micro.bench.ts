/** The converter's inner loops, each alone, in memory. The ratio is that of our tar reader to tar-stream's. */
import { atLeast, type Benchmark, round } from './benchmark.ts';
import { checksums } from './micro/checksums.ts';
import { clusterCodecs } from './micro/cluster-codecs.ts';
import { directories } from './micro/directories.ts';
import { tarParsing } from './micro/tar-parsing.ts';

export const benchmark: Benchmark = {
  name: 'micro',
  about: 'tar parsing against tar-stream; checksums, cluster codecs, directories',
  async run() {
    const tar = await tarParsing();
    const own = tar.find((speed) => speed.name === 'TarReader')!;
    const peer = tar.find((speed) => speed.name === 'tar-stream')!;
    const ratio = round(own.mbPerSecond / peer.mbPerSecond);
    return {
      ratio,
      ...atLeast(1, ratio),
      against: 'tar-stream, parsing the same tar',
      n: own.samples,
      p50: own.p50Ms,
      p99: own.p99Ms,
      unit: 'ms',
      tar,
      checksums: await checksums(),
      codecs: await clusterCodecs(),
      directories: await directories(),
    };
  },
};
