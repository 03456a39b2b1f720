/** `dsec verify`: whether images are whole and undamaged. */
import { humanSize } from '#base';
import { listImages, openImage, type VerifyReport, verifyImage } from '#imagesvc';
import { fail } from '../../errors.ts';
import type { CommandDefinition } from '../command.ts';
import { type JsonOption, openChosenStore, type StoreOption, withJson, withStore } from '../store-option.ts';

export const definition: CommandDefinition = {
  description:
    'Checks images: every byte of every blob against its digest, the chunk digests against the data, and the EROFS structure of every layer (every ' +
    'inode, folder, extent and attribute). Exits with 3 when something is wrong, and says in which blob.',
  examples: [
    { line: 'dsec verify web:1', what: 'an image' },
    { line: 'dsec verify --all', what: 'every image of the store' },
  ],
  configure(command, context) {
    const { output, progress, signal } = context;
    withJson(withStore(command))
      .argument('[images...]', 'names or digests')
      .option('--all', 'every image of the store')
      .action(async (names: string[], options: StoreOption & JsonOption & { all?: boolean }) => {
        if ((options.all ?? false) === names.length > 0) {
          throw fail('CLI_USAGE', { problem: 'name images, or give --all', program: 'dsec verify' });
        }
        const store = await openChosenStore(options);
        const wanted = options.all ? (await listImages(store)).map((image) => image.name) : names;
        const reports: VerifyReport[] = [];
        for (const name of wanted) {
          signal.throwIfAborted();
          const report = await verifyImage(store, await openImage(store, name), { progress });
          reports.push(report);
          if (options.json) continue;
          for (const { blob, problem } of report.problems) await output.line(`${report.image}: ${blob}: ${problem}`);
          const listed = report.problems.length;
          if (report.problemCount > listed)
            await output.line(`${report.image}: and ${report.problemCount - listed} more problems`);
          const extent = `${report.layers} layers, ${report.inodes} inodes, ${report.blobs} blobs, ${humanSize(report.blobBytes)}`;
          await output.line(`${report.image}: ${report.ok ? 'ok' : 'DAMAGED'} (${extent})`);
        }
        if (options.json) await output.json(reports.length === 1 ? reports[0] : reports);
        if (reports.some((report) => !report.ok)) context.exitCode = 3;
      });
  },
};
