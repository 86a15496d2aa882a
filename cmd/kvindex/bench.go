// This file is the command bench: its commands are in files of their own.

package main

func benchCommand() command {
	return command{
		use:   "bench",
		short: "Measure index structures, the query side and the relay",
		long: `Bench measures what kvindex takes on this machine: the index structures in this process,
without Kafka, on a workload made from a trace of requests; the query side, in a process
of its own; and the relay, with an engine that is played.`,
		example: `  kvindex bench workload --synthetic 5000 --route best -o conversations.kvw
  kvindex bench index --file conversations.kvw --mode seq
  kvindex bench index --mode scale --blocks 10000000
  kvindex bench query
  kvindex bench relay`,
		sub: []command{benchIndexCommand(), benchQueryCommand(), benchRelayCommand(), benchWorkloadCommand()},
	}
}
