/** Every error the control folder makes: one table, whose rows are in errors/, by what they are about. */
import { errorTable } from '#base';
import { clusterErrors } from './errors/cluster.ts';
import { commandLineErrors } from './errors/command-line.ts';
import { iamErrors } from './errors/iam.ts';
import { nodeErrors } from './errors/node.ts';

const rows = { ...clusterErrors, ...commandLineErrors, ...iamErrors, ...nodeErrors };

/** By code. */
export const controlErrors = Object.fromEntries(
  Object.entries(rows).sort(([one], [other]) => (one < other ? -1 : 1)),
) as typeof rows;

export const fail = errorTable(controlErrors);
