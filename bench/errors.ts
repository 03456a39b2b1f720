/** Every error the benchmarks make of their own. Kept alphabetical. */
import { errorTable } from '#base';

export const benchErrors = {
  BENCH_COMMAND: {
    message: '`{command}` ended with {status}: {output}',
    hint: 'run the command by hand to see more; its files are kept with --keep',
    exit: 1,
    http: 500,
  },
  BENCH_CORPUS: {
    message: 'this machine has no more than {have} of files to make {what} from; {want} are needed',
    hint: 'ask for less with --mb=N',
    exit: 5,
    http: 501,
  },
  BENCH_DAEMON: {
    message: '{daemon} did not answer within {seconds} s: {output}',
    hint: 'start it by hand as the message shows',
    exit: 5,
    http: 501,
  },
  BENCH_OPTION: {
    message: '--{name}={value}: a number above 0 is needed',
    exit: 2,
    http: 400,
  },
  BENCH_SOAK: {
    message: '{problem}',
    hint: 'what the services said is on their stderr; run it again with --keep to look at what is left',
    exit: 1,
    http: 500,
  },
  BENCH_SPACE: {
    message: '{folder} has {have} free, {want} are needed',
    hint: 'set TMPDIR to a folder with more room, or leave --full out',
    exit: 5,
    http: 507,
  },
} as const;

export const fail = errorTable(benchErrors);
