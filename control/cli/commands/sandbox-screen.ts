/** `dsec sandbox screen`, `type`, `key`, `mouse`, `clipboard` and `console`: full machines, by what they show and what can be pressed. */
import { readFileSync, writeFileSync } from 'node:fs';
import type { Command } from 'commander';
import { humanSize } from '#base';
import { BUTTONS, CLIPBOARD_TYPES, MOST_CLIPBOARD_BYTES, type ScreenAction, SELECTIONS } from '#runtime';
import { fail } from '../../errors.ts';
import { choice } from '../choice.ts';
import type { Example } from '../command.ts';
import type { Context } from '../context.ts';
import { withExamples } from '../examples.ts';
import { sandboxClient } from '../sandbox-client-of.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface ScreenCommand extends JsonOption {
  readonly output?: string;
}

interface MouseCommand extends JsonOption {
  readonly button: string;
  readonly count: string;
}

interface ClipboardCommand extends JsonOption {
  readonly selection: string;
  readonly type: string;
  readonly file?: string;
}

interface ConsoleCommand {
  readonly follow?: boolean;
  readonly interactive?: boolean;
}

export function addScreenCommands(command: Command, context: Context): void {
  const { output } = context;
  const machine = (name: string, description: string, examples: readonly Example[]) =>
    withExamples(command.command(name).description(description), examples).argument(
      '<name>',
      'as `dsec sandbox ls` shows it',
    );

  const screen = machine(
    'screen',
    'Takes a picture of the screen of a full machine (create --backend vm), as PNG. To watch and use it with a mouse, lead port 5900 of it here: that is VNC.',
    [
      { line: 'dsec sandbox screen desk -o desk.png', what: 'into a file' },
      { line: 'dsec sandbox port desk 5900', what: 'VNC at 127.0.0.1:5900' },
    ],
  );
  withJson(screen)
    .option('-o, --output <file>', 'where it goes (default: stdout, when that is no terminal)')
    .action(async (name: string, options: ScreenCommand) => {
      const isMissing = options.output === undefined && (options.json === true || output.isTerminal);
      if (isMissing) {
        const problem = 'a picture is no text: name a file with -o, or send it into one';
        throw fail('CLI_USAGE', { problem, program: 'dsec sandbox screen' });
      }
      const png = await sandboxClient(context).screenshot(name);
      if (options.output === undefined) return output.write(png);
      writeFileSync(options.output, png);
      const [width, height] = [png.readUInt32BE(16), png.readUInt32BE(20)];
      if (options.json) await output.json({ file: options.output, width, height, sizeBytes: png.length });
      else await output.line(`${options.output}: ${width} x ${height}, ${humanSize(png.length)}`);
    });

  const type = machine(
    'type',
    'Types text on the keyboard of a full machine: ASCII, as on a keyboard of the United States. Also the way to paste into a machine without an agent.',
    [{ line: "dsec sandbox type desk 'echo hello' && dsec sandbox key desk enter", what: 'a command in its terminal' }],
  );
  withJson(type)
    .argument('<text>', 'what to type')
    .action((name: string, text: string, options: JsonOption) => {
      const parts = text.match(/[\s\S]{1,4096}/g) ?? [];
      return act(
        context,
        name,
        parts.map((part) => ({ type: 'text', text: part })),
        options,
      );
    });

  const key = machine(
    'key',
    'Presses keys of a full machine, one chord after the other: names joined by `+` are held together. Names: a to z, 0 to 9, f1 to f12, enter, esc, tab, ' +
      'space, backspace, delete, insert, home, end, pgup, pgdn, up, down, left, right, shift, ctrl, alt, super and those of QEMU.',
    [
      { line: 'dsec sandbox key desk ctrl+alt+f2', what: 'another console' },
      { line: 'dsec sandbox key desk down down enter', what: 'the third of a menu' },
    ],
  );
  withJson(key)
    .argument('<keys...>', 'chords')
    .action((name: string, keys: string[], options: JsonOption) =>
      act(
        context,
        name,
        keys.map((chord) => ({ type: 'key', keys: chord === '+' ? ['+'] : chord.split('+') })),
        options,
      ),
    );

  const mouse = machine(
    'mouse',
    'Moves the mouse of a full machine, clicks or scrolls. Places are pixels of its picture (`dsec sandbox screen`).',
    [
      { line: 'dsec sandbox mouse desk click 200,140', what: 'the left button there' },
      { line: 'dsec sandbox mouse desk click 200,140 --button right', what: 'its menu' },
      { line: 'dsec sandbox mouse desk scroll 3', what: 'three steps down; up: -- -3' },
    ],
  );
  withJson(mouse)
    .argument('<what>', 'move, click, press, release or scroll')
    .argument('[where]', 'X,Y; for scroll: steps')
    .option('--button <button>', 'left, middle or right', 'left')
    .option('--count <n>', 'of clicks: 2 is a double one', '1')
    .action((name: string, what: string, where: string | undefined, options: MouseCommand) =>
      act(context, name, [mouseAction(what, where, options)], options),
    );

  const clipboard = machine(
    'clipboard',
    'Prints what is in the clipboard of a full machine whose guest has an agent of SPICE (spice-vdagent), or puts something there, for whoever pastes in it. At most 4 MiB.',
    [
      { line: 'dsec sandbox clipboard desk get', what: 'what was copied in it' },
      { line: "dsec sandbox clipboard desk set 'hello'", what: 'text to paste' },
      { line: 'dsec sandbox clipboard desk set - < notes.txt', what: 'from standard input' },
      { line: 'dsec sandbox clipboard desk get --type image/png --file copied.png', what: 'a picture' },
    ],
  );
  withJson(clipboard)
    .argument('<what>', 'get or set')
    .argument('[text]', 'for set; -: standard input')
    .option('--selection <which>', 'clipboard, or primary: what is selected, pasted by the middle button', 'clipboard')
    .option('--type <type>', 'text/plain or image/png', 'text/plain')
    .option('--file <file>', 'where it goes or comes from')
    .action(async (name: string, what: string, text: string | undefined, options: ClipboardCommand) => {
      const refuse = (problem: string) => fail('CLI_USAGE', { problem, program: 'dsec sandbox clipboard' });
      const type = choice('--type', options.type, CLIPBOARD_TYPES)!;
      const selection = choice('--selection', options.selection, SELECTIONS)!;
      const { file, json } = options;
      const client = sandboxClient(context);
      if (what === 'set') {
        if ((text === undefined) === (file === undefined)) throw refuse('set takes a text, -, or --file');
        const bytes = await clipboardInput(context, text, file);
        await client.setClipboard(name, type, selection, bytes);
        if (json) await output.json({ name, selection, type, sizeBytes: bytes.length });
        return;
      }
      if (what !== 'get' || text !== undefined) throw refuse(`${what}: get, or set with a text`);
      if (type !== 'text/plain' && file === undefined) throw refuse('a picture is no text: name a file with --file');
      const bytes = await client.clipboard(name, type, selection);
      if (bytes !== undefined && file !== undefined) writeFileSync(file, bytes);
      if (json) {
        const isShown = bytes !== undefined && file === undefined;
        const shown = isShown ? { text: bytes.toString('utf8') } : {};
        return output.json({ name, selection, type, sizeBytes: bytes?.length ?? null, file, ...shown });
      }
      if (bytes === undefined) throw fail('CLI_CLIPBOARD_EMPTY', { type, selection, name });
      if (file === undefined) await output.write(bytes);
      else await output.line(`${file}: ${humanSize(bytes.length)}`);
    });

  machine(
    'console',
    'Prints what a full machine wrote to its serial console last, at most 64 KiB. What is written while nobody listens to the service is lost.',
    [
      { line: 'dsec sandbox console desk', what: 'how it booted' },
      { line: "printf 'root\\n' | dsec sandbox console desk -i", what: 'logs in' },
      { line: 'dsec sandbox console desk --follow', what: 'until it ends or you interrupt it' },
    ],
  )
    .option('-f, --follow', 'go on with what it writes from now on')
    .option('-i, --interactive', 'send standard input to it first')
    .action(async (name: string, { follow = false, interactive = false }: ConsoleCommand) => {
      const client = sandboxClient(context);
      if (interactive) await client.writeConsole(name, context.caller?.stdin ?? process.stdin);
      for await (const bytes of client.console(name, follow, context.signal)) await output.write(bytes);
    });
}

/** @throws CLI_USAGE beyond what a clipboard takes */
async function clipboardInput(context: Context, text: string | undefined, file: string | undefined): Promise<Buffer> {
  if (file !== undefined) return readFileSync(file);
  if (text !== '-') return Buffer.from(text!);
  const parts: Buffer[] = [];
  let sizeBytes = 0;
  for await (const part of (context.caller?.stdin ?? process.stdin) as AsyncIterable<Buffer>) {
    sizeBytes += part.length;
    if (sizeBytes > MOST_CLIPBOARD_BYTES) {
      const problem = `a clipboard takes at most ${MOST_CLIPBOARD_BYTES} bytes`;
      throw fail('CLI_USAGE', { problem, program: 'dsec sandbox clipboard' });
    }
    parts.push(part);
  }
  return Buffer.concat(parts);
}

async function act(
  context: Context,
  name: string,
  actions: readonly ScreenAction[],
  { json }: JsonOption,
): Promise<void> {
  await sandboxClient(context).act(name, actions);
  if (json) await context.output.json({ name, actions: actions.length });
}

/** @throws CLI_USAGE */
function mouseAction(what: string, where: string | undefined, options: MouseCommand): ScreenAction {
  const refuse = (problem: string) => fail('CLI_USAGE', { problem, program: 'dsec sandbox mouse' });
  const button = choice('--button', options.button, BUTTONS)!;
  if (what === 'scroll') {
    if (!/^-?\d{1,3}$/.test(where ?? '')) throw refuse(`scroll ${where ?? ''}: a number of steps, up are negative`);
    return { type: 'scroll', steps: Number(where) };
  }
  if (what === 'press' || what === 'release') return { type: what, button };
  const place = /^(\d{1,5}),(\d{1,5})$/.exec(where ?? '');
  if (place === null && (what === 'move' || where !== undefined)) throw refuse(`${what} ${where ?? ''}: X,Y in pixels`);
  const at = place === null ? {} : { x: Number(place[1]), y: Number(place[2]) };
  if (what === 'move') return { type: 'move', x: at.x!, y: at.y! };
  if (what !== 'click') throw refuse(`${what}: move, click, press, release or scroll`);
  if (!/^([1-9]|10)$/.test(options.count)) throw refuse(`--count ${options.count}: from 1 to 10`);
  return { type: 'click', ...at, button, count: Number(options.count) };
}
