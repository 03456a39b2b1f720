/** The supervisor as a process: started in the background by data-server.ts, tells it whether it serves, and stays. */
import { isDsecError, messageOf } from '#base';
import { Supervisor, type SupervisorConfig } from './supervisor.ts';

/** What it tells whoever started it. */
export type SupervisorMessage =
  | { readonly event: 'ready' }
  | { readonly event: 'failed'; readonly code: string | undefined; readonly message: string };

const supervisor = new Supervisor(JSON.parse(process.argv[2]!) as SupervisorConfig);
// A terminal that goes away, or Ctrl-C in the command that started it, is not meant for it.
process.on('SIGHUP', () => {});
process.on('SIGINT', () => {});
process.on('SIGTERM', () => {
  try {
    supervisor.stop(false);
  } catch (error) {
    process.stderr.write(`not ended: ${messageOf(error)}\n`);
  }
});
try {
  await supervisor.start();
  await tell({ event: 'ready' });
} catch (error) {
  process.stderr.write(`${messageOf(error)}\n`);
  await tell({ event: 'failed', code: isDsecError(error) ? error.code : undefined, message: messageOf(error) });
  process.exit(1);
}
if (process.connected) process.disconnect();
await supervisor.ended;
process.exit(0);

function tell(message: SupervisorMessage): Promise<void> {
  return new Promise((sent) => {
    if (process.send === undefined || !process.connected) return sent();
    process.send(message, () => sent());
  });
}
