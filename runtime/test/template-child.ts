/** A process of its own that makes a template: killed at the place that $DSEC_FAILPOINT names. */
import { findAgent } from '../backend/agent-binary.ts';
import type { RuntimeFolders } from '../index.ts';
import { prepareTemplate, type TemplateWish } from '../vm/warm-pool/prepare-template.ts';

const { wish, folders } = JSON.parse(process.argv[2]!) as {
  readonly wish: TemplateWish;
  readonly folders: RuntimeFolders;
};
await prepareTemplate(wish, folders, findAgent()!.path);
