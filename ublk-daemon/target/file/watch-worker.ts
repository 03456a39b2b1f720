/** The thread that sleeps until a FUSE device has requests: the thread that serves them cannot, it has other things to do. */
import { parentPort, workerData } from 'node:worker_threads';
import { waitForTags } from '#linux';
import { WAKE, type WatchData } from './device-watch.ts';

const { epoll } = workerData as WatchData;
for (;;) {
  const tags = waitForTags(epoll);
  if (tags.includes(WAKE)) break;
  parentPort!.postMessage(tags);
}
