/** Waits to be hung up, and ends as the command line does. */
import { endProcess } from '../cli/end-process.ts';

process.on('SIGHUP', () => endProcess(129));
setInterval(() => {}, 1000);
console.log('ready');
