// This file is the command bench: its two commands are in files of their own.

package main

func benchCommand() command {
	return command{
		use:   "bench",
		short: "Measure index structures, and make the workloads for it",
		long: `Bench measures the index structures in this process, without Kafka: make a workload from
a trace of requests, then run structures on it.`,
		example: `  kvindex bench workload --synthetic 5000 --route best -o conversations.kvw
  kvindex bench index --file conversations.kvw --mode seq
  kvindex bench index --mode scale --blocks 10000000`,
		sub: []command{benchIndexCommand(), benchRelayCommand(), benchWorkloadCommand()},
	}
}
