/** A command that may use a device which this very process serves: spawnSync would wait for ever. */
import { spawn } from 'node:child_process';

/** Its output. @throws Error with the output when it fails */
export function run(command: string, ...args: string[]): Promise<string> {
  return new Promise((done, failed) => {
    const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'] });
    let text = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', (more: string) => {
        text += more;
      });
    }
    child.once('error', failed);
    child.once('close', (status) =>
      status === 0 ? done(text) : failed(new Error(`${command} ${args.join(' ')}: ${status}\n${text}`)),
    );
  });
}
