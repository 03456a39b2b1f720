/**
 * A process that does what may wait for a disk that our own process serves: making and freeing a loop device over it, unmounting it. In a
 * thread of the server such a call could not be ended: killed in the middle, the server would wait for its own answer, and never let go of
 * the device whose end would end the wait.
 *
 * Messages: an `Order`, answered with an `Outcome`. Ends with whoever started it.
 */
import { closeSync, constants, openSync } from 'node:fs';
import { messageOf, systemCode } from '#base';
import { attachLoop, detachLoop, umount } from '#linux';
import type { Order, Outcome } from './device-order.ts';

process.on('message', (order: Order) => {
  let outcome: Outcome;
  try {
    outcome = { value: carryOut(order) };
  } catch (error) {
    outcome = { error: messageOf(error), code: systemCode(error) };
  }
  process.send!(outcome);
});
process.on('disconnect', () => process.exit(0));
// A terminal's Ctrl-C is for the server, which has orders yet to give.
for (const signal of ['SIGINT', 'SIGHUP', 'SIGTERM'] as const) process.on(signal, () => {});

function carryOut(order: Order): string {
  switch (order.do) {
    case 'attach-loop': {
      const { path, readOnly, blockSize } = order;
      // Without autoclear it stays when its last user has closed it.
      const loop = attachLoop(path, { readOnly, blockSize, autoclear: false });
      loop.close();
      return loop.path;
    }
    case 'detach-loop':
      return String(detachLoop(order.path));
    case 'start':
      return 'started';
    case 'claim':
      closeSync(openSync(order.path, constants.O_RDONLY | constants.O_EXCL));
      return 'free';
    case 'unmount':
      umount(order.path, { lazy: order.lazy });
      return 'unmounted';
  }
}
