/** What `dsec convert` says about one image, wherever it was converted. */
import { type Conversion, type JobResult, sizesOf } from '#imagesvc';

export interface ConversionReport extends JobResult {
  readonly source: string;
}

export function reportOn({ source, name, digest, image, reused, stats, notes }: Conversion): ConversionReport {
  const { kind, layers } = image;
  return {
    source,
    name,
    digest,
    kind,
    layers: layers.length,
    ...sizesOf(image),
    reused,
    stats: stats && { ...stats },
    notes,
  };
}
