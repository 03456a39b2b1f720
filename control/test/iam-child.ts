/** A process that reserves and releases without end, and says of each what it is about to do and what was answered. It is there to be killed. */
import { writeSync } from 'node:fs';
import { openIam } from '../iam/open-iam.ts';

const [database = '', project = '', seed = '0'] = process.argv.slice(2);
const iam = await openIam({ database });
const say = (line: string) => writeSync(1, `${line}\n`);
const amounts = { sandboxes: 1, cpuMilli: 100, memoryBytes: 1 << 20, diskBytes: 1 << 20 };
say('ready');
let count = 0;
async function work(): Promise<never> {
  for (;;) {
    try {
      const edge = `e${count++ % 4}`;
      const { id } = await iam.reserve({ project, user: `u${seed}`, amounts });
      say(`reserved ${id}`);
      await iam.asking(id, edge);
      await iam.placed(id, edge, `s-${id}`);
      say(`placed ${id} ${edge}`);
      if (count % 3 === 0) {
        say(`releasing ${id}`);
        await iam.release(id);
        say(`released ${id}`);
      }
    } catch (error) {
      if ((error as { code?: string }).code !== 'IAM_QUOTA') say(`failed ${String(error)}`);
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
  }
}
await Promise.all(Array.from({ length: 8 }, work));
