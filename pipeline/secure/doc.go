// Package secure is authentication and encryption for this project's processes: TLS
// and SASL towards Kafka, TLS for the query ports and their clients, bearer tokens.
//
// Each secret is in a file of its own, never in a setting, and is read again
// when the file has changed, so that certificates, passwords and tokens can be
// rotated without a restart. If a changed file is wrong, that is reported, and its
// former content stays in use.
package secure
