/** `dsec disk resize`, `merge`: other sizes, fewer layers. */
import { existsSync } from 'node:fs';
import type { Command } from 'commander';
import { humanSize } from '#base';
import { mergeDisk, mergeLayers } from '#ublk-daemon';
import { storeLayerOpener } from '../../disk-layers.ts';
import { fail } from '../../errors.ts';
import { onDisk, refuseShrinkAttached } from '../../ublkd-service/disk-work.ts';
import type { Context } from '../context.ts';
import { counted } from '../counted.ts';
import { type LayerFormatOption, layerFormat, withLayerFormat } from '../disk-image-options.ts';
import { withExamples } from '../examples.ts';
import { parseSize } from '../size.ts';
import { type JsonOption, withJson } from '../store-option.ts';

interface ResizeOptions extends JsonOption {
  readonly size: string;
  readonly shrink?: boolean;
}

interface MergeOptions extends JsonOption, LayerFormatOption {
  readonly output?: string;
  readonly tar?: boolean;
  readonly whole?: boolean;
  readonly dropSnapshots?: boolean;
}

export function addReshape(command: Command, { output, signal }: Context): void {
  const resize = withExamples(
    command
      .command('resize')
      .description(
        'Gives a disk another size. The file system in it stays as it is: grow it afterwards (resize2fs), make it smaller before. What lies beyond a smaller ' +
          'size is gone, and needs a disk that is not in use; its snapshots keep their size. It costs a layer.',
      ),
    [
      { line: 'dsec disk resize work --size 128G', what: 'larger' },
      { line: 'dsec disk resize work --size 8G --shrink', what: 'smaller' },
    ],
  );
  withJson(resize)
    .argument('<disk>', 'its name')
    .requiredOption('--size <size>', 'of the device: 64G, 512MiB')
    .option('--shrink', 'also where that is smaller')
    .action(async (name: string, options: ResizeOptions) => {
      const sizeBytes = parseSize('--size', options.size);
      const { told } = await onDisk(
        name,
        {
          async here(opened) {
            if (sizeBytes < opened.disk.sizeBytes) await refuseShrinkAttached(name);
            await opened.resize(sizeBytes, { shrink: options.shrink });
            return { told: true };
          },
          there: (service) => service.resize(name, sizeBytes),
        },
        { openStoreLayer: storeLayerOpener() },
      );
      if (options.json) await output.json({ disk: name, sizeBytes, told });
      else await output.line(`${name}: ${humanSize(sizeBytes)}`);
      if (!told) output.note('dsec: those who have it open now see the new size when they open it again');
    });
  const merge = withExamples(
    command
      .command('merge')
      .description(
        'Makes one layer of several. Of a disk: of those between two of its snapshots, so that the snapshots stay and what it was made of stays shared; it ' +
          'must not be in use, and no other disk may lie on these layers. With --output: of layer files, bottom first, into a file, as overlaybd-merge does.',
      ),
    [
      { line: 'dsec disk merge work', what: 'fewer layers, nothing else changes' },
      { line: 'dsec disk merge work --drop-snapshots --whole', what: 'one layer, on nothing' },
      { line: 'dsec disk merge base.tar web.tar -o both.tar --tar --compress zstd', what: 'files' },
    ],
  );
  withJson(withLayerFormat(merge, 'none'))
    .argument('<what...>', 'a disk, or layer files')
    .option('-o, --output <file>', 'the layer that files become; it must not be there')
    .option('--tar', 'the file in the tar that registries carry')
    .option('--drop-snapshots', 'of a disk: also across its snapshots, which go')
    .option('--whole', 'of a disk: also what it was made of, so that it depends on no image and no other disk')
    .action(async (what: string[], options: MergeOptions) => {
      const { output: path, tar = false, dropSnapshots, whole } = options;
      const openStoreLayer = storeLayerOpener();
      const usage = (problem: string) => fail('CLI_USAGE', { problem, program: 'dsec disk merge' });
      if (path !== undefined) {
        if (dropSnapshots || whole) throw usage('--drop-snapshots and --whole are for disks');
        if (existsSync(path)) throw fail('CLI_OUTPUT_EXISTS', { path });
        const missing = what.find((file) => !existsSync(file));
        if (missing !== undefined) throw fail('CLI_INPUT_MISSING', { path: missing });
        const made = await mergeLayers(what, path, {
          zfile: layerFormat(options, 'file'),
          tar,
          openStoreLayer,
          signal,
        });
        if (options.json) await output.json({ ...made, layers: what.length });
        else await output.line(`${path}: ${counted(what.length, 'layer')} in one, ${humanSize(made.sizeBytes)}`);
        return;
      }
      const [name, ...others] = what;
      if (others.length > 0) throw usage('name one disk, or give --output for layer files');
      if (tar || options.compress !== undefined) throw usage('--tar and --compress are for --output');
      const done = await mergeDisk(name!, { dropSnapshots, whole, openStoreLayer, signal });
      if (options.json) await output.json({ disk: name, ...done });
      else await output.line(`${name}: ${counted(done.layersBefore, 'sealed layer')} before, ${done.layersAfter} now`);
    });
}
