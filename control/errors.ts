/** Every error the control folder makes. Kept alphabetical. */
import { errorTable } from '#base';

export const controlErrors = {
  CLI_BATCH_LINE: {
    message: '{file}:{line}: {problem}',
    hint: 'each line is `SOURCE NAME`: oci:layouts/web:latest web:1. A source with blanks stands in double quotes. Empty lines and lines that start with # are skipped',
    exit: 2,
    http: 400,
  },
  CLI_DISK_SNAPSHOT: {
    message: 'disk {disk} has no snapshot {snapshot}: {known}',
    hint: 'dsec disk ls shows the snapshots of each disk',
    exit: 4,
    http: 404,
  },
  CLI_DURATION: {
    message: '{option} {text}: not a time',
    hint: 'give a number with a unit: 90s, 15m, 1h, 7d',
    exit: 2,
    http: 400,
  },
  CLI_INPUT_DENIED: {
    message: 'cannot read {path}: permission denied',
    hint: 'run as a user who may read it',
    exit: 5,
    http: 403,
  },
  CLI_INPUT_MISSING: {
    message: 'cannot read {path}: no such file',
    hint: 'check the path',
    exit: 4,
    http: 404,
  },
  CLI_INPUT_UNREADABLE: {
    message: 'cannot read {path}: {reason}',
    hint: 'check the path and its permissions',
    exit: 2,
    http: 400,
  },
  CLI_NOT_UTF8: {
    message: '{program}: {what} is not valid UTF-8: {text}',
    hint: 'only paths inside images, mount targets, --exclude of pack-diff and -o of export may hold such bytes; for a command in a sandbox, have a shell in it make them: sh -c "... $(printf \'\\377\')"',
    exit: 2,
    http: 400,
  },
  CLI_OUTPUT: {
    message: 'cannot write to stdout: {reason}',
    hint: 'where stdout leads to is full or cannot be written: send it elsewhere',
    exit: 1,
    http: 500,
  },
  CLI_OUTPUT_EXISTS: {
    message: '{path} is there already',
    hint: 'name another file, or remove that one first',
    exit: 1,
    http: 409,
  },
  CLI_OUTPUT_FILE: {
    message: 'cannot write {path}: {reason}',
    hint: 'check that its folder is there, may be written, and has space',
    exit: 1,
    http: 500,
  },
  CLI_SIZE: {
    message: '{option} {text}: not a size',
    hint: 'give bytes, or a number with a unit: 65536, 64KiB, 1.5MiB, 3GiB, 500MB',
    exit: 2,
    http: 400,
  },
  CLI_SYNC_LINE: {
    message: '{file}:{line}: {problem}',
    hint: 'each line is the name of an image: web:1. Empty lines and lines that start with # are skipped',
    exit: 2,
    http: 400,
  },
  CLI_USAGE: {
    message: '{problem}',
    hint: '`{program} --help` shows how it is used',
    exit: 2,
    http: 400,
  },
  MAIN_JOB_COMMAND: {
    message: 'in the sandbox, `{command}` ended with status {status}',
    hint: 'what it printed is above; `dsec doctor` says what this machine lacks',
    exit: 1,
    http: 500,
  },
  MAIN_JOB_DIFFERS: {
    message: 'the packed image printed {actual} where {expected} was expected',
    hint: 'this is a bug in dsec: report it with the output above',
    exit: 1,
    http: 500,
  },
  MAIN_JOB_ROOT: {
    message: 'mounting images and running sandboxes needs root; what needs none is done',
    hint: 'type: sudo npm start',
    exit: 5,
    http: 403,
  },
  MAIN_JOB_TOOL: {
    message: 'the main job needs {tool}, which is not here',
    hint: 'install it with `apt-get install {package}`, or run npm start as root, which does',
    exit: 5,
    http: 501,
  },
  SERVE_NEEDS_ROOT: {
    message: 'the runtime service needs root: it mounts file systems and makes namespaces',
    hint: 'type: sudo dsec serve runtime',
    exit: 5,
    http: 403,
  },
  SERVE_NO_LAUNCHER: {
    message: 'the runtime service needs dsec-agent, which is not built, or from other sources than those here',
    hint: 'node scripts/setup.mjs builds it where there is a Rust compiler (apt-get install rustc)',
    exit: 5,
    http: 501,
  },
  SERVE_RUNS_ALREADY: {
    message: 'a runtime service runs already, at {socket}',
    hint: 'end that one with SIGTERM, or name another run folder with $DSEC_RUN',
    exit: 1,
    http: 409,
  },
} as const;

export const fail = errorTable(controlErrors);
