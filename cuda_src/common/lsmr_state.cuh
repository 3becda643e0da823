// The scalars of LSMR for one right-hand side: plane rotations, norms, condition estimate and stopping tests.
//
// The formulas are those of Fong and Saunders, "LSMR: An iterative algorithm for sparse least-squares problems" (SIAM
// J. Sci. Comput. 33, 2011), in SciPy's arrangement and with its order of tests. Everything is float64, counters too,
// so that the host reads one plain array.
#pragma once
#include "numeric.cuh"

namespace rawops {

enum LsmrPhase : int { kStart, kRun, kStopped };
enum LsmrStop : int { kMaxiter = 7, kCondMachine = 6, kLeastMachine = 5, kSolveMachine = 4, kCond = 3, kLeast = 2, kSolve = 1 };

struct LsmrSettings {
    double damp, atol, btol, ctol, maxiter;
};

// The vectors are kept unnormalised: the array of u is tau * beta times the unit vector, that of v sigma * alpha times, and
// what would divide them goes into the scalars of the next product. tau and sigma are powers of two that keep both near
// norm 1, so that products with a float32 matrix of norm 1e-30 or 1e30 do not underflow or overflow.
struct LsmrScalars {
    double istop, itn, normr, normar, norma, conda, normx, phase;  // the host reads these
    double forward_alpha, forward_beta;                            // u = forward_alpha A v + forward_beta u
    double adjoint_alpha, adjoint_beta;                            // v = adjoint_alpha A^H u + adjoint_beta v
    double normb, alpha, beta, tau, sigma, untested, clears_x;
    double over_u, over_v;  // one over the norms of the arrays
    double zetabar, alphabar, rho, rhobar, cbar, sbar;
    double betadd, betad, rhodold, tautildeold, thetatilde, zeta, d;
    double norma2, maxrbar, minrbar, rhotemp;
};

struct LsmrState {
    LsmrSettings settings;
    LsmrScalars now;   // written by lsmr_scalars, read by everything up to lsmr_update
    LsmrScalars next;  // written by lsmr_update, which has many readers of `now`
};

static_assert(sizeof(LsmrState) == 81 * sizeof(double), "_lsmr_engine.py knows where the scalars lie");

// How lsmr_update moves the vectors.
struct LsmrMove {
    double hbar, x, h, v;  // factors: hbar = h + (hbar) hbar, x += (x) hbar, h = (v) v + (h) h
};

struct Rotation {
    double c, s, r;
};

__device__ inline double sign_of(double x) { return x > 0 ? 1 : x < 0 ? -1 : x; }

// The power of two that brings a norm to 1..2.
__device__ inline double power_of_two(double norm) {
    const int64_t exponent = __double_as_longlong(norm) >> 52 & 0x7ff;
    return exponent == 0 || exponent >= 0x7fe ? 1 : __longlong_as_double((0x7fe - exponent) << 52);
}

// The plane rotation that makes (r, 0) of (a, b), r >= 0. One root and no division, since a single thread waits for it.
__device__ inline Rotation rotate(double a, double b) {
    if (b == 0) return {sign_of(a), 0, fabs(a)};
    if (a == 0) return {0, sign_of(b), fabs(b)};
    const double scale = power_of_two(fmax(fabs(a), fabs(b)));
    a *= scale, b *= scale;
    const double square = a * a + b * b, inverse = rsqrt(square);
    return {a * inverse, b * inverse, square * inverse * power_of_two(scale)};
}

// What normalises a vector of this norm. One of norm 0 stays what it is; what overflowed is NaN from here on.
__device__ inline double inverse(double norm) {
    if (norm == 0) return 1;
    return norm < 1.0 / 0.0 ? 1 / norm : 0.0 / 0.0;
}

// Products with these scalars change nothing and read no matrix.
__device__ inline void freeze(LsmrScalars& s) {
    s.phase = kStopped, s.untested = 0;
    s.forward_alpha = s.adjoint_alpha = 0, s.forward_beta = s.adjoint_beta = 1;
}

// After u = b - A x0 and before v = A^H u. The first product with the forward scalars only scales u.
__device__ inline void begin(LsmrState& state, const LsmrSettings& settings, double normb, double beta) {
    LsmrScalars s = {};
    s.phase = kStart, s.normb = normb, s.beta = beta;
    s.tau = s.forward_beta = power_of_two(beta);
    s.over_u = inverse(s.tau * beta);
    s.adjoint_alpha = beta > 0 ? s.over_u : 0;
    state.settings = settings, state.now = state.next = s;
}

// The scalars of u = A v - alpha u.
__device__ inline void aim_u(LsmrScalars& s) {
    s.tau = power_of_two(s.alpha);
    s.forward_alpha = s.tau * s.over_v, s.forward_beta = -s.tau * s.alpha * s.over_u;
}

// The scalars of v = A^H u - beta v, from the norm of the array of u. Where u vanished, v and its norm stay.
__device__ inline void aim_v(LsmrScalars& s, double norm_u) {
    s.beta = norm_u * power_of_two(s.tau);
    s.over_u = inverse(norm_u);
    s.adjoint_alpha = 0, s.adjoint_beta = 1;
    if (!(s.beta > 0)) return;
    s.sigma = power_of_two(s.alpha);
    s.adjoint_alpha = s.sigma * s.over_u, s.adjoint_beta = -s.sigma * s.beta * s.over_v;
}

// After the first v: the state before iteration 1, or the end where there is nothing to do.
__device__ inline LsmrMove prepare(LsmrScalars& s, const LsmrSettings& settings, double norm_v) {
    s.alpha = s.beta > 0 ? norm_v : 0;
    s.zetabar = s.normar = s.alpha * s.beta;
    s.alphabar = s.alpha;
    s.rho = s.rhobar = s.cbar = s.rhodold = s.conda = 1;
    s.betadd = s.normr = s.beta;
    s.norma2 = s.alpha * s.alpha, s.norma = s.alpha, s.minrbar = 1e100;
    s.sigma = power_of_two(s.alpha), s.over_v = inverse(s.sigma * s.alpha);
    aim_u(s);
    s.phase = kRun;
    s.clears_x = s.normar != 0 && s.normb == 0;
    if (s.normar == 0 || s.normb == 0 || !(settings.maxiter > 0)) freeze(s);
    return {0, 0, 0, s.sigma * s.over_v};
}

// What one iteration leaves for its estimates.
struct LsmrTurn {
    LsmrMove move;
    Rotation hat, q;
    double thetabar, rhobarold, zetaold;
};

// After the new v, from the norm of its array: the rotations that x needs, and the scalars of the next u.
__device__ inline LsmrTurn turn(LsmrScalars& s, double damp, double norm_v) {
    if (s.beta > 0) s.alpha = norm_v * power_of_two(s.sigma), s.over_v = inverse(norm_v);
    const Rotation hat = rotate(s.alphabar, damp), q = rotate(hat.r, s.beta);
    const double rhoold = s.rho, rhobarold = s.rhobar, zetaold = s.zeta, thetanew = q.s * s.alpha;
    s.rho = q.r, s.alphabar = q.c * s.alpha;
    const double thetabar = s.sbar * s.rho;
    s.rhotemp = s.cbar * s.rho;
    const Rotation bar = rotate(s.rhotemp, thetanew);
    s.cbar = bar.c, s.sbar = bar.s, s.rhobar = bar.r;
    s.zeta = s.cbar * s.zetabar, s.zetabar = -s.sbar * s.zetabar;
    const LsmrMove move = {-(thetabar * s.rho / (rhoold * rhobarold)), s.zeta / (s.rho * s.rhobar), -(thetanew / s.rho),
                           s.over_v};
    aim_u(s);
    return {move, hat, q, thetabar, rhobarold, zetaold};
}

// After `turn`: the norms of r, A^H r and A, and the condition of A.
__device__ inline void estimate(LsmrScalars& s, const LsmrTurn& t) {
    const double betaacute = t.hat.c * s.betadd, betacheck = -t.hat.s * s.betadd, betahat = t.q.c * betaacute;
    s.betadd = -t.q.s * betaacute;
    const Rotation tilde = rotate(s.rhodold, t.thetabar);
    s.betad = -tilde.s * s.betad + tilde.c * betahat;
    s.tautildeold = (t.zetaold - s.thetatilde * s.tautildeold) / tilde.r;
    s.thetatilde = tilde.s * s.rhobar, s.rhodold = tilde.c * s.rhobar;
    const double taud = (s.zeta - s.thetatilde * s.tautildeold) / s.rhodold, gap = s.betad - taud;
    s.d += betacheck * betacheck;
    s.normr = sqrt(s.d + gap * gap + s.betadd * s.betadd);
    s.normar = fabs(s.zetabar);

    s.norma2 += s.beta * s.beta;
    s.norma = sqrt(s.norma2);
    s.norma2 += s.alpha * s.alpha;
    s.itn += 1;
    s.maxrbar = t.rhobarold > s.maxrbar ? t.rhobarold : s.maxrbar;
    if (s.itn > 1) s.minrbar = t.rhobarold < s.minrbar ? t.rhobarold : s.minrbar;
    s.conda = (s.rhotemp > s.maxrbar ? s.rhotemp : s.maxrbar) / (s.rhotemp < s.minrbar ? s.rhotemp : s.minrbar);
    s.untested = 1;
}

// After the new x: the stopping tests. A comparison with NaN is false, so NaN only ever stops at maxiter.
__device__ inline void judge(LsmrScalars& s, const LsmrSettings& settings, double normx) {
    s.normx = normx;
    const double scale = s.norma * normx / s.normb, product = s.norma * s.normr;
    const double test1 = s.normr / s.normb, test2 = product != 0 ? s.normar / product : 1.0 / 0.0, test3 = 1 / s.conda;
    const double t1 = test1 / (1 + scale), rtol = settings.btol + settings.atol * scale;
    if (s.itn >= settings.maxiter) s.istop = kMaxiter;
    if (1 + test3 <= 1) s.istop = kCondMachine;
    if (1 + test2 <= 1) s.istop = kLeastMachine;
    if (1 + t1 <= 1) s.istop = kSolveMachine;
    if (test3 <= settings.ctol) s.istop = kCond;
    if (test2 <= settings.atol) s.istop = kLeast;
    if (test1 <= rtol) s.istop = kSolve;
    s.untested = 0;
}

// A row of the history, which is a ring of rows (columns, 5).
__device__ inline void record(const LsmrScalars& s, double* __restrict__ history, int rows, int column, int columns) {
    double* row = history + ((int64_t(s.itn) - 1) % rows * columns + column) * 5;
    row[0] = s.normr, row[1] = s.normar, row[2] = s.norma, row[3] = s.conda, row[4] = s.normx;
}

}  // namespace rawops
