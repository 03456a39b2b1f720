/** `dsec context`: which cluster commands speak to. */
import { resolve } from 'node:path';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { type ApiContext, checkedUrl, contextsPath, readContexts, writeContexts } from '../contexts.ts';
import { withExamples } from '../examples.ts';
import { type JsonOption, withJson } from '../store-option.ts';

const NAME = /^[a-z0-9][a-z0-9_.-]{0,62}$/;

interface SetOptions {
  readonly url?: string;
  readonly token?: string;
  readonly tokenFile?: string;
  readonly ca?: string;
  readonly use?: boolean;
}

export const definition: CommandDefinition = {
  description:
    'Keeps names for APIs of clusters, in contexts.json of this user, which the SDKs read too. Where one is current, `dsec sandbox`, `dsec nodes` and the like speak ' +
    'to it; `dsec context use local` goes back to this machine. For one command: --api URL or --api NAME, or $DSEC_API with $DSEC_TOKEN.',
  examples: [
    { line: 'dsec context set team --url https://dsec.corp:7070 --token-file ~/.dsec-token --use', what: 'a cluster' },
    { line: 'dsec context ls', what: 'what there is; * marks the current one' },
    { line: 'dsec context use local', what: 'the sandboxes of this machine again' },
  ],
  json: 'ls: an object: `current`, `contexts` (an array: `name`, `url`, `tokenFile`, `ca`; tokens are not shown)',
  configure(command, { output }) {
    const path = contextsPath();
    const ls = withExamples(command.command('ls').description('Lists contexts.'), [
      { line: 'dsec context ls', what: 'all; * marks the current one' },
    ]);
    withJson(ls).action(async ({ json }: JsonOption) => {
      const { current, contexts } = readContexts(path);
      const rows = Object.entries(contexts).map(([name, { url, tokenFile, ca }]) => ({ name, url, tokenFile, ca }));
      if (json) return output.json({ current: current ?? null, contexts: rows });
      if (rows.length === 0) return output.note('no contexts; commands are for this machine');
      await output.table(
        [{ title: '' }, { title: 'NAME' }, { title: 'URL' }],
        [
          ...rows.map(({ name, url }) => [name === current ? '*' : '', name, url]),
          ...(contexts.local === undefined ? [[current === undefined ? '*' : '', 'local', 'this machine']] : []),
        ],
      );
    });

    withExamples(
      command
        .command('use')
        .description('Makes a context the current one; `local`, where no context is called so: this machine.'),
      [{ line: 'dsec context use team', what: 'commands speak to it from now on' }],
    )
      .argument('<name>', 'as `dsec context ls` shows it')
      .action(async (name: string) => {
        const { contexts } = readContexts(path);
        if (contexts[name] === undefined && name !== 'local') throw fail('CONTEXT_NONE', { name, path });
        writeContexts(path, { current: contexts[name] === undefined ? undefined : name, contexts });
        await output.line(contexts[name] === undefined ? 'this machine' : `${name}: ${contexts[name].url}`);
      });

    withExamples(command.command('set').description('Makes a context, or changes one: what is not named stays.'), [
      {
        line: 'dsec context set team --url http://10.0.0.1:7070 --token-file ~/.dsec-token',
        what: 'with the token in a file',
      },
      { line: 'dsec context set team --ca ~/corp-ca.pem', what: 'of an authority that this machine does not know' },
    ])
      .argument('<name>', 'how it is called: a-z, 0-9, dots, dashes')
      .option('--url <url>', 'http(s)://HOST:PORT of the API')
      .option('--token-file <file>', 'where the token is; it is read each time')
      .option('--token <token>', 'the token itself; others on this machine may see it while this command runs')
      .option('--ca <file>', 'certificates of the authority of its certificate')
      .option('--use', 'make it the current one')
      .action(async (name: string, options: SetOptions) => {
        if (!NAME.test(name)) throw fail('CONTEXT_NAME', { name });
        const { current, contexts } = readContexts(path);
        const before = contexts[name];
        const url = options.url === undefined ? before?.url : checkedUrl(options.url);
        if (url === undefined)
          throw fail('CLI_USAGE', { problem: `${name} is new: it needs --url`, program: 'dsec context set' });
        // A token goes to the URL that it was given for, and to no other.
        const kept = before?.url === url ? { token: before.token, tokenFile: before.tokenFile, ca: before.ca } : {};
        const context: ApiContext = { url, ...kept, ...givenIn(options) };
        const next = options.use ? name : current;
        writeContexts(path, { current: next, contexts: { ...contexts, [name]: context } });
        await output.line(`${name}: ${url}${next === name ? ', current' : ''}`);
      });

    withExamples(command.command('rm').description('Forgets contexts.'), [
      { line: 'dsec context rm team', what: 'one; if it was current, commands are for this machine again' },
    ])
      .argument('<names...>', 'as `dsec context ls` shows them')
      .action(async (names: string[]) => {
        const { current, contexts } = readContexts(path);
        for (const name of names) if (contexts[name] === undefined) throw fail('CONTEXT_NONE', { name, path });
        const left = Object.fromEntries(Object.entries(contexts).filter(([name]) => !names.includes(name)));
        writeContexts(path, {
          current: current !== undefined && left[current] === undefined ? undefined : current,
          contexts: left,
        });
        for (const name of names) await output.line(`${name}: forgotten`);
      });
  },
};

function givenIn({ token, tokenFile, ca }: SetOptions): Partial<ApiContext> {
  return {
    ...(token === undefined ? {} : { token, tokenFile: undefined }),
    ...(tokenFile === undefined ? {} : { tokenFile: resolve(tokenFile), token: undefined }),
    ...(ca === undefined ? {} : { ca: resolve(ca) }),
  };
}
