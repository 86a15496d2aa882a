// This file makes TLS settings of files.

package secure

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// keyPair is a watched certificate with its key.
func keyPair(certFile, keyFile string, failed func(error)) *watched[tls.Certificate] {
	return &watched[tls.Certificate]{
		paths: []string{certFile, keyFile},
		parse: func(c [][]byte) (tls.Certificate, error) {
			pair, err := tls.X509KeyPair(c[0], c[1])
			if err != nil {
				err = fmt.Errorf("certificate %s with key %s: %w", certFile, keyFile, err)
			}
			return pair, err
		},
		failed: failed,
	}
}

// authorities is a watched file of CA certificates.
func authorities(file string, failed func(error)) *watched[*x509.CertPool] {
	return &watched[*x509.CertPool]{
		paths: []string{file},
		parse: func(c [][]byte) (*x509.CertPool, error) {
			pool := x509.NewCertPool()
			if !pool.AppendCertsFromPEM(c[0]) {
				return nil, fmt.Errorf("%s: no CA certificate in PEM form", file)
			}
			return pool, nil
		},
		failed: failed,
	}
}

// clientFiles are the files of one that connects, each of them optional.
type clientFiles struct {
	ca   *watched[*x509.CertPool]  // nil: the system's
	pair *watched[tls.Certificate] // nil: none
}

// newClientFiles watches files; empty names are none.
func newClientFiles(caFile, certFile, keyFile string) clientFiles {
	var f clientFiles
	if caFile != "" {
		f.ca = authorities(caFile, nil)
	}
	if certFile != "" {
		f.pair = keyPair(certFile, keyFile, nil)
	}
	return f
}

// config is for one handshake: what the files say now.
func (f clientFiles) config(serverName string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: serverName}
	var err error
	if f.ca != nil {
		if c.RootCAs, err = f.ca.get(); err != nil {
			return nil, err
		}
	}
	if f.pair != nil {
		pair, err := f.pair.get()
		if err != nil {
			return nil, err
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return c, nil
}

// checkFiles says what is wrong with the files of one that connects; prefix is
// that of the flags.
func checkFiles(prefix string, on bool, caFile, certFile, keyFile string) error {
	var errs []error
	for _, f := range []struct{ name, path string }{{"ca-file", caFile}, {"cert-file", certFile}, {"key-file", keyFile}} {
		if f.path != "" && !on {
			errs = append(errs, fmt.Errorf("%s%s: given without %[1]stls", prefix, f.name))
		}
	}
	if (certFile == "") != (keyFile == "") {
		errs = append(errs, fmt.Errorf("%scert-file and %[1]skey-file: give both or none", prefix))
	}
	if err := errors.Join(errs...); err != nil || !on {
		return err
	}
	f := newClientFiles(caFile, certFile, keyFile)
	if f.ca != nil {
		if _, err := f.ca.get(); err != nil {
			errs = append(errs, fmt.Errorf("%sca-file: %w", prefix, err))
		}
	}
	if f.pair != nil {
		if _, err := f.pair.get(); err != nil {
			errs = append(errs, fmt.Errorf("%scert-file: %w", prefix, err))
		}
	}
	return errors.Join(errs...)
}
