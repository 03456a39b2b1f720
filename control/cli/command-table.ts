/** Every command, in the order of `dsec --help`: enough to list them, and how to load each. */
import type { CommandDefinition } from './command.ts';

export interface CommandEntry {
  readonly name: string;
  readonly summary: string;
  load(): Promise<{ readonly definition: CommandDefinition }>;
}

export const commandTable: readonly CommandEntry[] = [
  {
    name: 'convert',
    summary: 'turn an OCI image, a tar or a folder into an EROFS image in the store',
    load: () => import('./commands/convert.ts'),
  },
  {
    name: 'push',
    summary: 'send a converted image to a registry or an OCI layout',
    load: () => import('./commands/push.ts'),
  },
  {
    name: 'pull',
    summary: 'fetch a converted image from a registry or an OCI layout',
    load: () => import('./commands/pull.ts'),
  },
  { name: 'images', summary: 'list the images of the store', load: () => import('./commands/images.ts') },
  {
    name: 'inspect',
    summary: 'show layers, sizes and config of an image',
    load: () => import('./commands/inspect.ts'),
  },
  { name: 'tag', summary: 'give an image further names', load: () => import('./commands/tag.ts') },
  { name: 'rm', summary: 'remove image names from the store', load: () => import('./commands/rm.ts') },
  {
    name: 'gc',
    summary: 'delete blobs of the store that no image needs',
    load: () => import('./commands/gc.ts'),
  },
  {
    name: 'sync',
    summary: 'copy a set of images to another store, each blob once',
    load: () => import('./commands/sync.ts'),
  },
  { name: 'ls', summary: 'list files of an image, without mounting it', load: () => import('./commands/ls.ts') },
  { name: 'cat', summary: 'print files of an image, without mounting it', load: () => import('./commands/cat.ts') },
  { name: 'stat', summary: 'show all attributes of a path in an image', load: () => import('./commands/stat.ts') },
  { name: 'diff', summary: 'compare two images: added, changed, deleted', load: () => import('./commands/diff.ts') },
  { name: 'export', summary: 'write the merged tree of an image as a tar', load: () => import('./commands/export.ts') },
  {
    name: 'verify',
    summary: 'check structure and every byte of an image against its digests',
    load: () => import('./commands/verify.ts'),
  },
  {
    name: 'dump',
    summary: 'show superblock, inode and extents as they are on disk',
    load: () => import('./commands/dump.ts'),
  },
  {
    name: 'stats',
    summary: 'show what of an image was ever read on this machine',
    load: () => import('./commands/stats.ts'),
  },
  { name: 'mount', summary: 'mount an image on a folder', load: () => import('./commands/mount.ts') },
  { name: 'umount', summary: 'unmount what `dsec mount` mounted', load: () => import('./commands/umount.ts') },
  { name: 'mounts', summary: 'list the mounted images of this machine', load: () => import('./commands/mounts.ts') },
  { name: 'run', summary: 'run a command in a sandbox on top of images', load: () => import('./commands/run.ts') },
  {
    name: 'trace',
    summary: 'record what a start of an image reads, so that the next one finds it fetched',
    load: () => import('./commands/trace.ts'),
  },
  {
    name: 'fncall',
    summary: 'run short tasks in containers that are there already',
    load: () => import('./commands/fncall.ts'),
  },
  { name: 'sandbox', summary: 'list, stop and remove sandboxes', load: () => import('./commands/sandbox.ts') },
  {
    name: 'pack-diff',
    summary: 'make an image of what a sandbox changed',
    load: () => import('./commands/pack-diff.ts'),
  },
  {
    name: 'disk',
    summary: 'block disks with snapshots: make, serve, pack; OverlayBD layers',
    load: () => import('./commands/disk.ts'),
  },
  {
    name: 'serve',
    summary: 'run a service of this node: images, or sandboxes that start at once',
    load: () => import('./commands/serve.ts'),
  },
  { name: 'nodes', summary: 'list the edges of a cluster', load: () => import('./commands/nodes.ts') },
  { name: 'drain', summary: 'have an edge take no new sandboxes', load: () => import('./commands/drain.ts') },
  {
    name: 'context',
    summary: 'which cluster commands speak to',
    load: () => import('./commands/context.ts'),
  },
  {
    name: 'project',
    summary: 'the tree of projects of a cluster',
    load: () => import('./commands/project.ts'),
  },
  {
    name: 'principal',
    summary: 'users, services and agents of a cluster',
    load: () => import('./commands/principal.ts'),
  },
  {
    name: 'policy',
    summary: 'who may do what on which projects',
    load: () => import('./commands/policy.ts'),
  },
  {
    name: 'token',
    summary: 'what callers show the API of a cluster',
    load: () => import('./commands/token.ts'),
  },
  {
    name: 'quota',
    summary: 'how much projects may use',
    load: () => import('./commands/quota.ts'),
  },
  {
    name: 'audit',
    summary: 'who did what in a cluster',
    load: () => import('./commands/audit.ts'),
  },
  {
    name: 'vm',
    summary: 'what sandboxes in virtual machines need of this node',
    load: () => import('./commands/vm.ts'),
  },
  {
    name: 'doctor',
    summary: 'show what this machine has, what for, and what falls back to what',
    load: () => import('./commands/doctor.ts'),
  },
  {
    name: 'main-job',
    summary: 'show the whole line once: convert, mount, run, pack, verify',
    load: () => import('./commands/main-job.ts'),
  },
  { name: 'version', summary: 'print the version', load: () => import('./commands/version.ts') },
];
