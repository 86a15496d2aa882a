# The targets of this project. `make test` is all that CI runs (.ci/run adds the prerequisites).

STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

.PHONY: build test race fuzz bench lint demo crash crash-relay proto
.DEFAULT_GOAL := build

build: ## bin/kvindex
	go build -o bin/ ./cmd/kvindex

test: lint build ## everything: lint, all tests under the race detector, 1,000 interleavings of replicas, each fuzz target for FUZZTIME (5s)
	.ci/test race long fuzz

race: ## all tests under the race detector: unit, conformance, random, integration on kfake and on a real Kafka
	.ci/test race

fuzz: ## each fuzz target for FUZZTIME: make fuzz FUZZTIME=1m
	.ci/test fuzz

bench:
	go test -run '^$$' -bench . -benchmem ./...

lint: ## gofmt, go vet, staticcheck
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "not gofmt'ed: $$unformatted"; exit 1; fi
	go vet ./... ./.ci/testsum
	go run $(STATICCHECK) ./... ./.ci/testsum

demo: ## a broker, the stage, a fleet, a crash, in one command and without services
	go run ./cmd/kvindex demo

# TRACE=file replays that trace instead of one made up; KAFKA_BROKERS=host:port,... uses brokers that run already.
crash: ## ten times kill -9 of the stage under load on a real Kafka, answers compared each time
	KVINDEX_KILLS=$(or $(KILLS),10) KVINDEX_TRACE=$(abspath $(TRACE)) go test -count 1 -timeout 20m -v -run TestKillNineUnderLoad ./cmd/kvindex/crash

crash-relay: ## twenty times kill -9 of engines, of the relay and of Kafka under load, answers compared each time with what the engines hold
	KVINDEX_ROUNDS=$(or $(ROUNDS),20) KVINDEX_RATE=120 KVINDEX_DOWN=9000 go test -count 1 -timeout 20m -v -run TestRelayKills ./cmd/kvindex/crash

proto: ## the Go code of the query protocol, with pinned generators (Python for protoc)
	pipeline/query/kvindexpb/gen.sh
