// This file is how one who asks a stage reaches a secured port.

package secure

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// Client is how to reach a stage's ports. The zero value is plaintext without
// a token.
type Client struct {
	TLS       bool
	CAFile    string // PEM; "": the system's authorities
	CertFile  string // PEM, for stages that want the client's; with KeyFile
	KeyFile   string
	TokenFile string // has the bearer token, on one line
}

// Validate says all that is wrong, each with its name as a flag, and reads every
// file once.
func (c *Client) Validate() error {
	err := checkFiles("", c.TLS, c.CAFile, c.CertFile, c.KeyFile)
	if c.TokenFile != "" {
		if _, tokenErr := readSecret(c.TokenFile); tokenErr != nil {
			err = errors.Join(err, fmt.Errorf("token-file: %w", tokenErr))
		}
	}
	return err
}

// DialOptions are for grpc.NewClient. Files that have changed are read again: the
// certificates' for each connection, the token's for each call.
func (c *Client) DialOptions() []grpc.DialOption {
	var opts []grpc.DialOption
	if c.TLS {
		opts = append(opts, grpc.WithTransportCredentials(&clientTLS{newClientFiles(c.CAFile, c.CertFile, c.KeyFile)}))
	}
	if c.TokenFile != "" {
		opts = append(opts, grpc.WithPerRPCCredentials(&bearer{&watched[string]{
			paths: []string{c.TokenFile},
			parse: func([][]byte) (string, error) { return readSecret(c.TokenFile) },
			every: tokensEvery,
		}}))
	}
	return opts
}

// HTTP returns what a connection to the stage's HTTP port needs, as the files are now:
// TLS for that server name, nil without, and the header Authorization, "" without a
// token.
func (c *Client) HTTP(serverName string) (cfg *tls.Config, authorization string, err error) {
	if c.TLS {
		if cfg, err = newClientFiles(c.CAFile, c.CertFile, c.KeyFile).config(serverName); err != nil {
			return nil, "", err
		}
	}
	if c.TokenFile != "" {
		token, err := readSecret(c.TokenFile)
		if err != nil {
			return nil, "", fmt.Errorf("bearer token: %w", err)
		}
		authorization = "Bearer " + token
	}
	return cfg, authorization, nil
}

// clientTLS is gRPC's TLS with the files as they are at each handshake.
type clientTLS struct{ files clientFiles }

func (c *clientTLS) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := c.files.config("")
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(cfg).ClientHandshake(ctx, authority, conn)
}

func (c *clientTLS) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("BUG: a client's credentials at a server")
}

func (c *clientTLS) Info() credentials.ProtocolInfo { return credentials.NewTLS(&tls.Config{}).Info() }

func (c *clientTLS) Clone() credentials.TransportCredentials { return &clientTLS{c.files} }

func (c *clientTLS) OverrideServerName(string) error {
	return errors.New("the server's name is that of its address")
}

// bearer shows the token of a file.
type bearer struct{ file *watched[string] }

func (b *bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	token, err := b.file.get()
	if err != nil {
		return nil, fmt.Errorf("bearer token: %w", err)
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity is false, for stages on the loopback.
func (b *bearer) RequireTransportSecurity() bool { return false }
