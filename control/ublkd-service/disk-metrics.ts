/** The figures of attached disks, read when they are asked for. A disk is known by its name, whatever device it has. */
import type { Metrics } from '#imagesvc';
import { type DiskDaemon, OPERATIONS } from '#ublk-daemon';
import type { StoreLayerOpener } from '../disk-layers.ts';

type Row = readonly [Readonly<Record<string, string>>, number];

export function diskMetrics(metrics: Metrics, daemon: DiskDaemon): void {
  const perOperation = (pick: (count: { count: number; bytes: number; errors: number; seconds: number }) => number) =>
    [...daemon.served()].flatMap(({ name, source }) =>
      OPERATIONS.map((operation): Row => [{ disk: name, operation }, pick(source.target.counts[operation])]),
    );
  const perDisk = (pick: (disk: NonNullable<ReturnType<typeof opened>>) => number | undefined) =>
    [...daemon.served()].flatMap((served): Row[] => {
      const disk = opened(served);
      const value = disk === undefined ? undefined : pick(disk);
      return value === undefined ? [] : [[{ disk: served.name }, value]];
    });

  metrics.total('dsec_disk_operations_total', 'Requests to disks, failed ones included.', () =>
    perOperation(({ count }) => count),
  );
  metrics.total('dsec_disk_bytes_total', 'Bytes of requests that succeeded.', () => perOperation(({ bytes }) => bytes));
  metrics.total('dsec_disk_errors_total', 'Requests that failed.', () => perOperation(({ errors }) => errors));
  metrics.total('dsec_disk_seconds_total', 'Time that requests took, in sum.', () =>
    perOperation(({ seconds }) => seconds),
  );
  metrics.gauge('dsec_disk_size_bytes', 'Size of the device.', () =>
    [...daemon.served()].map(({ name, source }): Row => [{ disk: name }, source.target.sizeBytes]),
  );
  metrics.gauge('dsec_disk_layers', 'Layers of the disk.', () => perDisk((disk) => disk.layerCount));
  metrics.gauge('dsec_disk_live_bytes', 'Bytes of the writable layer that hold something.', () =>
    perDisk((disk) => disk.usage?.liveBytes),
  );
  metrics.gauge('dsec_disk_used_bytes', 'Bytes that the writable layer takes, overwritten ones included.', () =>
    perDisk((disk) => disk.usage?.usedBytes),
  );
  metrics.gauge('dsec_disks', 'Disks of the table by state and way out.', () => {
    const counts = new Map<string, [Readonly<Record<string, string>>, number]>();
    for (const { state, way } of daemon.list()) {
      const key = `${state} ${way}`;
      counts.set(key, [{ state, way }, (counts.get(key)?.[1] ?? 0) + 1]);
    }
    return [...counts.values()];
  });
  metrics.gauge('dsec_disk_table_saved', '1: what is attached is on the disk; 0: the table cannot be written.', () =>
    daemon.unsaved === undefined ? 1 : 0,
  );
  const startedAt = Date.now() / 1000;
  metrics.gauge('process_resident_memory_bytes', 'Resident memory.', () => process.memoryUsage.rss());
  metrics.gauge('process_start_time_seconds', 'When the service started.', () => startedAt);
}

/** Of disks whose layers are in stores: what their chunk caches had, and what was fetched. */
export function cacheMetrics(metrics: Metrics, layers: StoreLayerOpener): void {
  metrics.total('dsec_disk_cache_chunks_total', 'Chunks that reads asked for, by where they were.', () =>
    layers.stats().flatMap(({ store, cache }): Row[] => [
      [{ store, from: 'memory' }, cache.memoryHits],
      [{ store, from: 'disk' }, cache.diskHits],
      [{ store, from: 'store' }, cache.misses],
    ]),
  );
  metrics.total('dsec_disk_fetched_bytes_total', 'Bytes that came from stores.', () =>
    layers.stats().map(({ store, cache }): Row => [{ store }, cache.interactiveBytes + cache.prefetchBytes]),
  );
}

function opened(served: ReturnType<DiskDaemon['attached']>) {
  return served.source.opened?.disk;
}
