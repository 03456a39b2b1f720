/** The limits of one command on this machine as it is. */
import { runLimits } from './limits-run-suite.ts';

runLimits('here');
