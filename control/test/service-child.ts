/** The command line from its sources, in a process of its own: as bin/dsec starts it, without a bundle. */
import { main } from '../cli/main.ts';

await main(process.argv.slice(2));
