/** What the runtime service takes from a client, and what it leaves to a process of the client's own. */
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { servableCommand } from '../runtime-service/servable.ts';

const root = join(import.meta.dirname, '../..');
const asked = (env: Record<string, string>, command = [join(root, 'bin/dsec'), 'run', 'x'], isFresh = true) =>
  servableCommand(
    {
      build: '',
      command,
      env,
      cwd: '/',
      terminals: [false, false, false],
      inputIsNull: false,
      terminalSize: undefined,
    },
    { root, env, isFresh: () => isFresh },
  );

it('takes a run of its own checkout, from the sources that it runs', () => {
  expect(asked({})).toEqual(['run', 'x']);
  expect(asked({ DSEC_STATE: '/s', DSEC_RUN: '/r', DSEC_CACHE: '' })).toEqual(['run', 'x']);
  expect(asked({}, undefined, false)).toBeUndefined();
  expect(asked({}, [join(root, 'bin/dsec'), 'images'])).toBeUndefined();
  expect(asked({}, ['/bin/sh', 'run'])).toBeUndefined();
});

it.each(['DSEC_STATE', 'DSEC_RUN', 'DSEC_CACHE'])(
  'leaves alone a %s that is meant from where the client stands',
  (name) => {
    expect(asked({ [name]: 'here' })).toBeUndefined();
    expect(asked({ [name]: './here' })).toBeUndefined();
  },
);
