// Package secure is how this project's processes prove who they are and see
// that nobody listens: TLS towards Kafka and SASL, TLS of the query ports and of
// those who ask them, bearer tokens.
//
// Each secret is in a file of its own, never in a setting, and is read again
// when the file has changed, so that certificates, passwords and tokens are
// rotated without a restart. What is read again and is wrong is reported and
// not taken: what was good before stays.
package secure
