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
    double zetabar, alphabar, rho, rhobar, cbar, sbar;
    double betadd, betad, rhodold, tautildeold, thetatilde, zeta, d;
    double norma2, maxrbar, minrbar, rhotemp;
};

struct LsmrState {
    LsmrSettings settings;
    LsmrScalars now;   // written by lsmr_scalars, read by everything up to lsmr_update
    LsmrScalars next;  // written by lsmr_update, which has many readers of `now`
};

static_assert(sizeof(LsmrState) == 77 * sizeof(double), "_lsmr_engine.py knows where the scalars lie");

// How lsmr_update moves the vectors.
struct LsmrMove {
    double hbar, x, h, v;  // factors: hbar = h + (hbar) hbar, x += (x) hbar, h = (v) v + (h) h
};

struct Rotation {
    double c, s, r;
};

__device__ inline double sign_of(double x) { return x > 0 ? 1 : x < 0 ? -1 : x; }

__device__ inline Rotation rotate(double a, double b) {
    if (b == 0) return {sign_of(a), 0, fabs(a)};
    if (a == 0) return {0, sign_of(b), fabs(b)};
    if (fabs(b) > fabs(a)) {
        const double tau = a / b, s = sign_of(b) / sqrt(1 + tau * tau);
        return {s * tau, s, b / s};
    }
    const double tau = b / a, c = sign_of(a) / sqrt(1 + tau * tau);
    return {c, c * tau, a / c};
}

// What normalises a vector of this norm. One of norm 0 stays what it is; what overflowed is NaN from here on.
__device__ inline double inverse(double norm) {
    if (norm == 0) return 1;
    return norm < 1.0 / 0.0 ? 1 / norm : 0.0 / 0.0;
}

// The power of two that brings a norm to 1..2.
__device__ inline double power_of_two(double norm) {
    const int64_t exponent = __double_as_longlong(norm) >> 52 & 0x7ff;
    return exponent == 0 || exponent >= 0x7fe ? 1 : __longlong_as_double((0x7fe - exponent) << 52);
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
    s.adjoint_alpha = beta > 0 ? inverse(s.tau * beta) : 0;
    state.settings = settings, state.now = state.next = s;
}

// The scalars of u = A v - alpha u.
__device__ inline void aim_u(LsmrScalars& s) {
    const double tau = power_of_two(s.alpha);
    s.forward_alpha = tau * inverse(s.sigma * s.alpha), s.forward_beta = -tau * s.alpha * inverse(s.tau * s.beta);
    s.tau = tau;
}

// The scalars of v = A^H u - beta v, from the norm of the array of u. Where u vanished, v and its norm stay.
__device__ inline void aim_v(LsmrScalars& s, double norm_u) {
    s.beta = norm_u / s.tau;
    s.adjoint_alpha = 0, s.adjoint_beta = 1;
    if (!(s.beta > 0)) return;
    const double sigma = power_of_two(s.alpha);
    s.adjoint_alpha = sigma * inverse(norm_u), s.adjoint_beta = -sigma * s.beta * inverse(s.sigma * s.alpha);
    s.sigma = sigma;
}

// After the first v: the state before iteration 1, or the end where there is nothing to do.
__device__ inline LsmrMove prepare(LsmrScalars& s, const LsmrSettings& settings, double norm_v) {
    s.alpha = s.beta > 0 ? norm_v : 0;
    s.zetabar = s.normar = s.alpha * s.beta;
    s.alphabar = s.alpha;
    s.rho = s.rhobar = s.cbar = s.rhodold = s.conda = 1;
    s.betadd = s.normr = s.beta;
    s.norma2 = s.alpha * s.alpha, s.norma = s.alpha, s.minrbar = 1e100;
    s.sigma = power_of_two(s.alpha);
    aim_u(s);
    s.phase = kRun;
    s.clears_x = s.normar != 0 && s.normb == 0;
    if (s.normar == 0 || s.normb == 0 || !(settings.maxiter > 0)) freeze(s);
    return {0, 0, 0, inverse(s.alpha)};
}

// After the new v: the rotations of one iteration.
__device__ inline LsmrMove step(LsmrScalars& s, const LsmrSettings& settings, double norm_v) {
    if (s.beta > 0) s.alpha = norm_v / s.sigma;
    const double alpha = s.alpha, beta = s.beta;
    const Rotation hat = rotate(s.alphabar, settings.damp);
    const double rhoold = s.rho, rhobarold = s.rhobar, zetaold = s.zeta;
    const Rotation q = rotate(hat.r, beta);
    const double thetanew = q.s * alpha;
    s.rho = q.r, s.alphabar = q.c * alpha;
    const double thetabar = s.sbar * s.rho;
    s.rhotemp = s.cbar * s.rho;
    const Rotation bar = rotate(s.rhotemp, thetanew);
    s.cbar = bar.c, s.sbar = bar.s, s.rhobar = bar.r;
    s.zeta = s.cbar * s.zetabar, s.zetabar = -s.sbar * s.zetabar;
    const LsmrMove move = {-(thetabar * s.rho / (rhoold * rhobarold)), s.zeta / (s.rho * s.rhobar), -(thetanew / s.rho),
                           inverse(s.sigma * alpha)};

    // the norm of r
    const double betaacute = hat.c * s.betadd, betacheck = -hat.s * s.betadd;
    const double betahat = q.c * betaacute;
    s.betadd = -q.s * betaacute;
    const double thetatildeold = s.thetatilde;
    const Rotation tilde = rotate(s.rhodold, thetabar);
    s.thetatilde = tilde.s * s.rhobar, s.rhodold = tilde.c * s.rhobar;
    s.betad = -tilde.s * s.betad + tilde.c * betahat;
    s.tautildeold = (zetaold - thetatildeold * s.tautildeold) / tilde.r;
    const double taud = (s.zeta - s.thetatilde * s.tautildeold) / s.rhodold, gap = s.betad - taud;
    s.d += betacheck * betacheck;
    s.normr = sqrt(s.d + gap * gap + s.betadd * s.betadd);

    // the norm of A, and its condition
    s.norma2 += beta * beta;
    s.norma = sqrt(s.norma2);
    s.norma2 += alpha * alpha;
    s.itn += 1;
    s.maxrbar = rhobarold > s.maxrbar ? rhobarold : s.maxrbar;
    if (s.itn > 1) s.minrbar = rhobarold < s.minrbar ? rhobarold : s.minrbar;
    s.conda = (s.rhotemp > s.maxrbar ? s.rhotemp : s.maxrbar) / (s.rhotemp < s.minrbar ? s.rhotemp : s.minrbar);
    s.normar = fabs(s.zetabar);

    aim_u(s);
    s.untested = 1;
    return move;
}

// After the new x: the stopping tests. A comparison with NaN is false, so NaN only ever stops at maxiter.
__device__ inline void test(LsmrScalars& s, const LsmrSettings& settings, double normx) {
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
    if (s.istop > 0) freeze(s);
}

}  // namespace rawops
