// Package testcontainers gives tests a Kafka broker behind one small interface, so that one integration suite runs against
// all of them:
//
//   - [Kfake], in this process: starts in a millisecond, compacts on demand, injects faults;
//   - [Native], a real Apache Kafka of 1 or 3 nodes, as processes on the loopback interface: starts in 3 to 6 s;
//   - [External], brokers that somebody else runs, named by the environment variable KAFKA_BROKERS.
//
// A package with integration tests has two lines of set-up, and what a broker must have beyond them (a topic, a client, a
// compacted log) comes from the helpers here:
//
//	func TestMain(m *testing.M) { testcontainers.Main(m) }
//
//	func TestRoundTrip(t *testing.T) {
//		testcontainers.Each(t, func(t *testing.T, b testcontainers.Broker) {
//			topic := testcontainers.NewTopic(t, b, "events", 2, nil)
//			cl := testcontainers.Client(t, b, kgo.ConsumeTopics(topic))
//			...
//		})
//	}
//
// Nothing here skips a test: a missing JDK, Maven or Python fails it, with a text that says what to install. The jars and the
// Python environments are fetched once and kept below the user's cache directory (os.UserCacheDir, folder kvindex); test
// processes that want the same at once wait for each other.
//
// Only tests use this package, on Linux and other Unix systems. On Linux the kernel kills a broker whose test process died;
// elsewhere a test process that is killed leaves its broker running.
package testcontainers
